"""What a `Profile` tells of the constants: its operators and links beside what the model predicts.

Operators are "gemm" (m, n, k), "attention" and "attention_backward" (sequences, heads, length, head
dimension; causal) and "copy" (bytes through memory), or the same under the names that `tutti
profile` writes ("linear.forward", …); links are "memory", the medium of the node's
largest island, and "network" (all NICs of a node). Fitting is `operators`' business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tutti.cost.arrays import FloatArray, Machine, Shape, Strategy
from tutti.cost.constants import Constants
from tutti.cost.operators.operator_times import (
    alignment_rate,
    fused_attention_seconds,
    gemm_seconds,
    memory_bound_seconds,
)
from tutti.errors import InputError
from tutti.hardware.chip import Chip, Dtype
from tutti.hardware.node import NodeType
from tutti.hardware.profile import OperatorTime, Profile

LEAST_GEMMS, LEAST_OTHERS = 4, 2  # a group with fewer keeps its priors
MEMORY, NETWORK = "memory", "network"
DIMS = {
    "gemm": ("m", "n", "k"),
    "attention": ("sequences", "heads", "length", "dim"),
    "attention_backward": ("sequences", "heads", "length", "dim"),
    "copy": ("bytes",),
}
_PLAUSIBLE = 1000.0  # a figure farther than this from the nominal one is not a measurement
# Priced by a speed-up over 16-bit products, which other constants hold.
_NARROW = frozenset({Dtype.FP8, Dtype.FP4, Dtype.INT8})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evidence:
    """Measurements of one kind: what they are, what the model says, which constants they move."""

    kind: str
    measured: FloatArray
    predict: Callable[[Constants], FloatArray]
    tells: tuple[str, ...]  # nothing where there are too few of them
    spans: str = ""  # "m 128 to 8192, …"


def evidence_of(profile: Profile, chip: Chip, node: NodeType) -> list[Evidence]:
    """Return all that a profile measured of the constants."""
    evidence = [*_operators(profile, chip), *_links(profile, chip, node)]
    if not evidence:
        raise InputError(
            f"profile of {profile.chip}: nothing to fit; it needs {', '.join(DIMS)} among its "
            f"operators, or the links {MEMORY}, {_medium(node) or 'of an island'} or {NETWORK}"
        )
    for one in evidence:
        _require_plausible(profile, one)
    return evidence


def _require_plausible(profile: Profile, evidence: Evidence) -> None:
    """Refuse figures that no such chip can have: milliseconds for seconds, shapes out of reach."""
    with np.errstate(all="ignore"):
        nominal = evidence.predict(Constants())
        ratio = evidence.measured / nominal
        wrong = ~((ratio > 1.0 / _PLAUSIBLE) & (ratio < _PLAUSIBLE))
    if np.any(wrong):
        row = int(np.argmax(wrong))
        spans = f" ({evidence.spans})" if evidence.spans else ""
        raise InputError(
            f"profile of {profile.chip}: {evidence.kind} {row}{spans}: {evidence.measured[row]:g} "
            f"is over {_PLAUSIBLE:g} times off the nominal {nominal[row]:g}; are these s and B/s?"
        )


def _operators(profile: Profile, chip: Chip) -> list[Evidence]:
    rows: dict[str, list[OperatorTime]] = {kind: [] for kind in DIMS}
    for found_entry in profile.operators:
        entry = _plain_entry(found_entry)
        if entry.operator not in DIMS:
            continue  # of an operator that no constant here is about
        if len(entry.shape) != len(DIMS[entry.operator]):
            raise InputError(
                f"profile of {profile.chip}: operator '{entry.operator}' has the shape "
                f"{list(entry.shape)}; expected {', '.join(DIMS[entry.operator])}"
            )
        if entry.dtype not in _NARROW or entry.operator == "copy":
            rows[entry.operator].append(entry)
    evidence = []
    if rows["gemm"]:
        evidence.append(_gemm(rows["gemm"], chip))
    if rows["copy"]:
        evidence.append(_copy(rows["copy"], chip))
    if rows["attention"]:
        evidence.append(_attention(rows["attention"], chip))
    if rows["attention_backward"]:
        told = len(rows["attention"]) >= LEAST_OTHERS  # its rate is relative to forward's
        evidence.append(_attention(rows["attention_backward"], chip, backward=True, told=told))
    return evidence


def _plain_entry(entry: OperatorTime) -> OperatorTime:
    """Return what `tutti profile` measured under the name and dimensions of the formulas."""
    name, shape = entry.operator, entry.shape
    if name.startswith("linear.") and len(shape) == 3:
        tokens, out, wide = shape
        order = {
            "linear.forward": (tokens, out, wide),
            "linear.input_gradient": (tokens, wide, out),
            "linear.weight_gradient": (wide, out, tokens),
        }.get(name)
        return entry if order is None else replace(entry, operator="gemm", shape=order)
    if name in ("attention.forward", "attention.backward") and len(shape) == 6:
        sequences, length, heads, _, dim, value_dim = shape
        if dim == value_dim:
            plain = "attention" if name == "attention.forward" else "attention_backward"
            return replace(entry, operator=plain, shape=(sequences, heads, length, dim))
    return entry


def _spans(rows: Sequence[OperatorTime]) -> str:
    columns = zip(DIMS[rows[0].operator], zip(*(r.shape for r in rows), strict=True), strict=True)
    return ", ".join(f"{name} {min(values)} to {max(values)}" for name, values in columns)


def _columns(rows: Sequence[OperatorTime]) -> list[FloatArray]:
    return list(np.asarray([row.shape for row in rows], dtype=np.float64).T)


def _seconds(rows: Sequence[OperatorTime]) -> FloatArray:
    return np.asarray([row.seconds for row in rows], dtype=np.float64)


def _machine(rows: Sequence[OperatorTime], chip: Chip) -> Machine:
    peaks = [chip.peak_flops(row.dtype, fallback=True) * chip.sustained for row in rows]
    return Machine.filled(
        peak=np.asarray(peaks),
        memory_bandwidth=chip.memory_bandwidth,
        compute_units=chip.compute_units,
        link=1.0,
    )


def _gemm(rows: Sequence[OperatorTime], chip: Chip) -> Evidence:
    m, n, k = _columns(rows)
    machine = _machine(rows, chip)
    sizes = np.asarray([row.dtype.num_bytes for row in rows])
    odd = bool(np.any((np.mod(n, 8) != 0) | (np.mod(k, 8) != 0)))

    def predict(constants: Constants) -> FloatArray:
        rate = alignment_rate(n, k, constants)
        seconds = np.zeros(())
        for size in np.unique(sizes):  # the bytes of an element are one number per call
            one = gemm_seconds(m, n, k, machine, constants, rate=rate, element_bytes=float(size))
            seconds = np.where(sizes == size, one, seconds)
        return seconds

    tells = ["gemm_efficiency", "gemm_fill_s", "wave_quantisation", "kernel_gap_s"]
    tells += ["hbm_efficiency", *(["misaligned_slowdown"] if odd else [])]
    return Evidence(
        kind="gemm",
        measured=_seconds(rows),
        predict=predict,
        tells=tuple(tells) if len(rows) >= LEAST_GEMMS else (),
        spans=_spans(rows),
    )


def _attention(
    rows: Sequence[OperatorTime], chip: Chip, *, backward: bool = False, told: bool = True
) -> Evidence:
    sequences, heads, length, dim = _columns(rows)
    machine = _machine(rows, chip)
    shape = Shape.filled(
        hidden=heads * dim, heads=heads, kv_heads=heads, d_qk=dim, d_v=dim, ffn=0, vocab=0,
        head_vocab=0,
    )  # fmt: skip
    strategy = Strategy.filled(sequence_length=length, sequences=sequences)

    def predict(constants: Constants) -> FloatArray:
        return fused_attention_seconds(shape, strategy, machine, constants)[backward]

    tells = ["flash_backward_ratio"] if backward else ["flash_efficiency"]
    if not backward and len(np.unique(np.minimum(dim, 128.0))) > 1:
        tells.append("flash_head_dim")
    return Evidence(
        kind=rows[0].operator,
        measured=_seconds(rows),
        predict=predict,
        tells=tuple(tells) if told and len(rows) >= LEAST_OTHERS else (),
        spans=_spans(rows),
    )


def _copy(rows: Sequence[OperatorTime], chip: Chip) -> Evidence:
    (num_bytes,) = _columns(rows)
    machine = _machine(rows, chip)
    tells = ("hbm_efficiency", "kernel_gap_s") if len(rows) >= LEAST_OTHERS else ()
    return Evidence(
        kind="copy",
        measured=_seconds(rows),
        predict=lambda constants: memory_bound_seconds(num_bytes, machine, constants),
        tells=tells,
        spans=_spans(rows),
    )


def _medium(node: NodeType) -> str | None:
    largest = max(node.islands, key=lambda island: len(island.slots), default=None)
    return largest.kind if largest is not None else None


def _links(profile: Profile, chip: Chip, node: NodeType) -> list[Evidence]:
    medium = _medium(node)
    island = max((i.bandwidth for i in node.islands if i.kind == medium), default=0.0)
    wanted = [
        (MEMORY, chip.memory_bandwidth, "hbm_efficiency", None),
        (medium, island, "link_efficiency", "link_latency_s"),
        (NETWORK, node.nic_bandwidth, "nic_efficiency", "nic_latency_s"),
    ]
    evidence = []
    for kind, nominal, share, latency in wanted:
        link = profile.link(kind) if kind is not None else None
        if link is None or nominal <= 0:
            continue
        evidence.append(_figure(f"link {kind}", share, link.bandwidth, nominal))
        if latency is not None and link.latency_s > 0:
            evidence.append(_figure(f"latency of {kind}", latency, link.latency_s, 1.0))
    return evidence


def _figure(kind: str, constant: str, measured: float, nominal: float) -> Evidence:
    """One figure that a constant times a nominal value should be."""

    def predict(constants: Constants) -> FloatArray:
        value = np.asarray(getattr(constants, constant), dtype=np.float64)
        return nominal * np.atleast_1d(value)

    return Evidence(kind=kind, measured=np.asarray([measured]), predict=predict, tells=(constant,))
