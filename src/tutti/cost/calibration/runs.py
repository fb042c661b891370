"""One published run: what was configured, as numbers to price, and what was measured.

`run_of` turns the cells of a row into a `Run` or raises `UnusableError` with the reason. The shape
comes from the columns, completed by the model catalog; the machine from the chip catalog.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from tutti.cost.arrays import Machine, Shape
from tutti.cost.calibration.conventions import Convention, folded, public_models
from tutti.cost.calibration.rows import (
    MOST_MEMORY_GIB,
    MOST_STEP_SECONDS,
    Cells,
    UnusableError,
    source_of,
)
from tutti.document import Place
from tutti.errors import InputError, hint
from tutti.hardware.chip import Chip, Dtype
from tutti.hardware.cluster import Cluster
from tutti.hardware.library import shipped
from tutti.hardware.pool import Pool
from tutti.models import load_model

# Shares of products, attention, element-wise work and collectives that run again.
_RECOMPUTED = {
    "selectiveop": (0.5, 0.0, 1.0, 0.5),  # torchtitan: the results of every other product are kept
    "selective": (0.0, 1.0, 0.0, 0.0),
    "full": (1.0, 1.0, 1.0, 1.0),
    "none": (0.0, 0.0, 0.0, 0.0),
}
_RECOMPUTE_WORDS = {word: float(number) for number, word in enumerate(_RECOMPUTED)}
_SHARD_WORDS = {"fsdp": 3.0, "zero3": 3.0, "distopt": 1.0, "zero1": 1.0, "ddp": 0.0}
_PRECISION_WORDS = {"fp4": 2.0, "fp8": 1.0, "bf16": 0.0, "fp16": 0.0, "amp": 0.0}
_SHAPE_COLUMNS = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "experts", "topk")
_PROBLEM = ("model", "n_gpus", "gbs", "seq", "precision")
_GIB = 2.0**30
# A chip's peak in each format of `_PRECISION_WORDS`, over its 16-bit peak: 16-bit, FP8, FP4.
PEAKS = (1.0, 2.0, 4.0)
FORMATS = ("16-bit", "FP8", "FP4")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run that can be priced."""

    id: str
    group: str
    chip: str  # its name in the catalog
    model: str
    cell: tuple[str, ...]  # rows of one cell reveal each other
    choice: tuple[str, ...]  # rows with the same are strategies for one problem
    source: Convention
    shape: Mapping[str, float]
    strategy: Mapping[str, float]
    machine: Mapping[str, float]
    peak_flops: float  # dense 16-bit, nominal
    step_seconds: float  # measured
    memory_bytes: float | None  # measured


def run_of(cells: Cells, *, mfu_in_percent: bool = False) -> Run:
    """Return the run of a row; UnusableError says why not."""
    source, group, model = source_of(cells), cells.text("group"), cells.text("model")
    for column in ("group", "model"):
        if not cells.is_given(column):
            raise UnusableError(f"'{column}' is empty")
    why = public_models().why_unpriced(model)
    if why is not None:
        raise UnusableError(f"model '{model}': {why}")
    measured = cells.number("step_time_s", most=MOST_STEP_SECONDS)
    memory = None
    if cells.is_given("peak_mem_GiB"):
        memory = cells.number("peak_mem_GiB", most=MOST_MEMORY_GIB) * _GIB
    chip = _chip(cells)
    shape = _shape(cells, source)
    strategy = _strategy(cells, source, shape)
    _check_utilisation(cells, int(strategy["fp8"]), mfu_in_percent)
    for rule in source.hints:
        if rule.contains in folded(cells.text(rule.column)):
            (shape if rule.field in shape else strategy)[rule.field] = rule.value
    inside = source.cell or ("id",)
    return Run(
        id=cells.text("id"),
        group=group,
        chip=chip.name,
        model=model,
        cell=(group, *(cells.text(column) for column in inside)),
        choice=(group, chip.name, *(cells.text(column) for column in _PROBLEM)),
        source=source,
        shape=shape,
        strategy=strategy,
        machine=_machine(chip.name, source),
        peak_flops=chip.peak_flops(Dtype.BF16, fallback=True),
        step_seconds=measured,
        memory_bytes=memory,
    )


def mfu_in_percent(rows: Sequence[Cells]) -> bool:
    """Tell whether a file's `mfu` column is in percent: half of it is above any format's peak."""
    plain = []
    for cells in rows:
        try:
            plain.append(float(cells.text("mfu")))
        except ValueError:  # empty, with its own sign, or no number
            continue
    known = sorted(value for value in plain if math.isfinite(value) and value != 0.0)
    return bool(known) and known[len(known) // 2] > PEAKS[-1]


def _check_utilisation(cells: Cells, precision: int, in_percent: bool) -> None:
    """Refuse a row whose model FLOPs are more than its format computes; 0 says nothing."""
    text = cells.text("mfu")
    if not cells.is_given("mfu"):
        return
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        raise UnusableError(
            f"'mfu' is '{text[:40]}'; expected a number, such as 0.45 or 45%"
        ) from None
    share = value / 100.0 if in_percent or text.endswith("%") else value
    if not 0.0 <= share <= PEAKS[precision]:
        raise UnusableError(
            f"'mfu' is {text[:40]}; expected a share of the 16-bit peak above 0, at most "
            f"{PEAKS[precision]:g} for {FORMATS[precision]}; percent as in 45%"
        )


# --- shape -----------------------------------------------------------------------------------


def _shape(cells: Cells, source: Convention) -> dict[str, float]:
    model = cells.text("model")
    known = public_models().shape(model)
    shape = _catalog_shape(known) if known is not None else {}
    whole = shape.get("layers", 0.0)
    given = {c: cells.count(c) for c in _SHAPE_COLUMNS if cells.is_given(c)}
    for column in ("layers", "hidden", "heads", "ffn"):
        if column not in given and column not in shape:
            raise UnusableError(f"'{column}' is empty and model '{model}' is in no catalog")
    if "vocab" not in given and "vocab" not in shape:
        vocabulary = public_models().vocabulary(model)
        if vocabulary is None:
            raise UnusableError(f"'vocab' is empty and that of model '{model}' is not known")
        given["vocab"] = float(vocabulary)
    if known is None:
        heads = given["heads"]
        if given["hidden"] % heads:
            raise UnusableError(f"{heads:g} heads do not divide hidden {given['hidden']:g}")
        given["d_qk"] = given["d_v"] = given["hidden"] / heads
        given.setdefault("kv_heads", heads)
        given |= {"tied": float(source.tied), "gated": cells.flag("gated_mlp", math.nan)}
        if math.isnan(given["gated"]):
            raise UnusableError("'gated_mlp' is empty")
    shape |= given
    if "vocab" in given:
        shape["head_vocab"] = given["vocab"]
    shape["dropout"] = float(source.dropout)
    if known is None:
        _without_catalog(shape, model)
    elif shape["layers"] < whole:  # a model cut short keeps one of its dense layers
        dense = min(whole - shape["moe_layers"], 1.0)
        shape["moe_layers"] = min(shape["moe_layers"], shape["layers"] - dense)
    if shape["heads"] % shape["kv_heads"]:
        raise UnusableError(
            f"{shape['kv_heads']:g} kv_heads do not divide {shape['heads']:g} heads"
        )
    return shape


def _without_catalog(shape: dict[str, float], model: str) -> None:
    """Add the experts of a model that no catalog has, where `ffn` is known to be their width."""
    if shape.get("experts", 0.0) <= 1.0:
        shape |= {"experts": 0.0, "topk": 0.0}
        return
    if "topk" not in shape:
        raise UnusableError("'topk' is empty, but the model has experts")
    if not public_models().experts_are_ffn_wide(model):
        raise UnusableError(f"the width of the experts of model '{model}' is not known")
    shape |= {"expert_ffn": shape["ffn"], "moe_layers": shape["layers"]}


@functools.lru_cache(maxsize=64)
def _catalog_numbers(name: str) -> tuple[tuple[str, float], ...]:
    spec = load_model(name)
    # Where windows alternate, the block without one stands for all.
    index = next((i for i, b in enumerate(spec.blocks) if b.attention.window is None), 0)
    moe = next((i for i, b in enumerate(spec.blocks) if b.moe is not None), index)
    shape = Shape.of(spec, index if spec.blocks[index].moe is not None else moe)
    numbers = {f.name: float(getattr(shape, f.name)) for f in fields(Shape)}
    return tuple({**numbers, "window": math.inf}.items())


def _catalog_shape(name: str) -> dict[str, float]:
    return dict(_catalog_numbers(name))


# --- strategy --------------------------------------------------------------------------------


def _strategy(cells: Cells, source: Convention, shape: Mapping[str, float]) -> dict[str, float]:
    out = {name: cells.count(name, 1.0) for name in ("tp", "pp", "vpp", "dp", "cp", "ep")}
    num_chips = cells.count("n_gpus")
    ranks = out["tp"] * out["pp"] * out["dp"] * out["cp"]
    if ranks != num_chips:
        raise UnusableError(f"tp × pp × dp × cp is {ranks:g}, but 'n_gpus' is {num_chips:g}")
    for name, limit, what in (("tp", "heads", "heads"), ("pp", "layers", "layers")):
        if out[name] > shape[limit]:
            raise UnusableError(f"{name} {out[name]:g} exceeds the {shape[limit]:g} {what}")
    if out["pp"] > 1 and source.interleave and not cells.is_given("vpp"):
        out["vpp"] = _interleaved(shape["layers"] / out["pp"], source.interleave)
    sequences, micro_batches = _batches(cells, source, out)
    word = int(cells.choice("recompute", _RECOMPUTE_WORDS, source))
    shares = list(tuple(_RECOMPUTED.values())[word])
    if shares[0] == 1.0 and source.stops_early:
        # torch's non-reentrant checkpoint stops once every saved tensor is back.
        mlp = (2.0 + shape["gated"]) * shape["ffn"]
        attention = 2.0 * (shape["heads"] + shape["kv_heads"]) * shape["d_qk"]
        shares[0] = 1.0 - shape["ffn"] / (mlp + attention)
    names = ("gemm", "attention", "elementwise", "network")
    precision = folded(cells.text("precision"))
    return {
        **out,
        "num_chips": num_chips,
        "sequence_length": cells.count("seq"),
        "sequences": sequences,
        "micro_batches": micro_batches,
        "sequence_parallel": cells.flag("seq_par", 1.0 if out["tp"] > 1 else 0.0),
        **{f"recompute_{name}": share for name, share in zip(names, shares, strict=True)},
        "flash": _flash(cells, source),
        "shard": cells.choice("shard", _SHARD_WORDS, source),
        "grad_bytes": source.grad_bytes,
        "param_comm_bytes": 2.0,
        "fp8": cells.choice("precision", _PRECISION_WORDS, source),
        "fp8_rowwise": float("rowwise" in precision),
        "once_per_node": float(source.dispatches_once),
        "compiled": 0.0,
        "async_tp": 0.0,
    }


def _interleaved(layers: float, wanted: int) -> float:
    """Return the model chunks of a stage of so many layers: as wanted or the next that divides."""
    if layers != int(layers):
        return 1.0
    return float(
        next(n for n in range(wanted, int(layers) + wanted) if layers % n == 0 or n >= layers)
    )


def _flash(cells: Cells, source: Convention) -> float:
    if not cells.is_given("flash_attn") and "flash_attn" in source.assume:
        return float(source.assume["flash_attn"])
    flash = cells.flag("flash_attn", math.nan)
    if math.isnan(flash):
        raise UnusableError("'flash_attn' is empty")
    return flash


def _batches(cells: Cells, source: Convention, degrees: Mapping[str, float]) -> tuple[float, float]:
    """Return sequences per micro-batch and micro-batches per replica."""
    pipelined = degrees["pp"] > 1
    tuned = source.pipelined_micro_batch if pipelined else source.micro_batch
    sequences = cells.count("mbs", float(tuned) if tuned is not None else None)
    if source.splits_local_batch and pipelined:
        sequences = max(1.0, sequences / degrees["pp"])
    batch = cells.count("gbs")
    together = degrees["dp"] * sequences
    if batch % together:
        raise UnusableError(
            f"dp × micro-batch is {together:g}, which does not divide gbs {batch:g}"
        )
    return sequences, batch / together


# --- machine ---------------------------------------------------------------------------------


def _chip(cells: Cells) -> Chip:
    name = cells.text("chip")
    try:
        chip = shipped().chip(name, Place(cells.text("id")).key("chip"))
    except InputError:
        chips = shipped().chips
        spellings = [*chips, *(alias for chip in chips.values() for alias in chip.aliases)]
        remedy = hint(name, spellings)
        raise UnusableError(f"chip '{name[:40]}' is in no catalog; {remedy}") from None
    if cells.is_given("peak_tflops"):
        stated = cells.number("peak_tflops", most=1e30) * 1e12
        catalog = chip.peak_flops(Dtype.BF16, fallback=True)
        if not 0.1 < stated / catalog < 10.0:
            raise UnusableError(
                f"'peak_tflops' is {stated / 1e12:g}, but a {chip.name} has {catalog / 1e12:g}"
            )
    return chip


@functools.lru_cache(maxsize=256)
def _usual_machine(name: str) -> tuple[tuple[str, float], ...]:
    library = shipped()
    pool = Pool(name="runs", node=library.node_for(library.chips[name]))
    machine = Machine.of(Cluster(name="runs", pools=(pool,)), pool, Dtype.BF16)
    return tuple((f.name, float(getattr(machine, f.name))) for f in fields(Machine))


def _machine(name: str, source: Convention) -> dict[str, float]:
    """Return the chip in its usual node, as far as the source does not say otherwise."""
    numbers = dict(_usual_machine(name))
    most = float(source.most_chips_per_node or numbers["chips_per_node"])
    share = min(1.0, most / numbers["chips_per_node"])
    numbers |= {key: numbers[key] * share for key in ("chips_per_node", "nic", "nics")}
    if source.nic is not None:
        numbers["nic"] = source.nic
    if source.nics is not None:
        numbers["nics"] = float(source.nics)
    return numbers
