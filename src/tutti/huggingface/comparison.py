"""Compares two dumps module by module and names the first that diverges.

The measure is the relative L2 distance, ‖a − b‖ ÷ max(‖a‖, ‖b‖). A gradient that is zero in exact
arithmetic (of a key's bias: softmax does not see it) is rounding noise on both sides, so gradients
are held against at least `NOISE` of the largest one's size per number.

Dumps of training runs are compared step by step. AdamW divides a gradient by its own size, so that
it makes whole updates out of rounding noise: weights and later gradients have more room, and
weights whose gradient is noise as a whole are not compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tutti.errors import InputError
from tutti.huggingface.dumps import Dump, DumpFacts

NOISE = 0.01

# How far apart two right implementations may be in a format, as relative L2; the coarser side of a
# pair decides. Measured with transformers over the tests' tiny models of 30 types: two ways to
# attend in fp32 differ by at most 9e-7 forward and 2e-6 in gradients; bf16 differs from fp32 by
# 0.4e-2 to 4e-2 forward and up to 9e-2 in gradients, which pass every rounding twice. fp16 rounds
# eight times finer than bf16. Beyond that a token may choose other experts: a real difference.
FORWARD_TOLERANCE: Mapping[str, float] = {
    "float64": 1e-10,
    "float32": 1e-5,
    "float16": 1e-2,
    "bfloat16": 5e-2,
}
GRADIENT_TOLERANCE: Mapping[str, float] = {
    "float64": 1e-9,
    "float32": 1e-5,
    "float16": 2e-2,
    "bfloat16": 1e-1,
}
# Of training. Under AdamW, numbers of a gradient that are near zero turn rounding into a whole
# update, so what an update came before is further apart. Measured over 12 steps in fp32 and 6 in
# the others, at learning rates up to a tenth of the weights' size, of a tiny model under two plans:
# fp32 by at most 6e-6 in weights and 3e-5 in later gradients; fp16 from fp32 by 1.5e-2 and 9e-2;
# bf16 from fp32 by 4e-2 and 2e-1. It did not grow with the steps; over long runs it may.
WEIGHT_TOLERANCE: Mapping[str, float] = {
    "float64": 1e-9,
    "float32": 2e-5,
    "float16": 2e-2,
    "bfloat16": 5e-2,
}
LATER_GRADIENT_TOLERANCE: Mapping[str, float] = {
    "float64": 1e-8,
    "float32": 1e-4,
    "float16": 1e-1,
    "bfloat16": 2.5e-1,
}


class TensorKind(StrEnum):
    """What a tensor of a dump is, which decides how far apart it may be."""

    FORWARD = "forward"
    GRADIENT = "gradient"
    WEIGHT = "weight"


@dataclass(frozen=True, slots=True)
class Key:
    """A dump's key, taken apart."""

    step: int | None  # of a training run; 0: before the first
    kind: TensorKind
    name: str  # "3.mlp.up.weight", "loss"

    @classmethod
    def parse(cls, key: str) -> Key:
        """Read "forward/3.mlp", "step-2/weight/3.mlp.up.weight" or "step-2/loss"."""
        step, rest = None, key
        if key.startswith("step-"):
            number, _, rest = key.removeprefix("step-").partition("/")
            step = int(number) if number.isdecimal() else None
        kind, _, name = rest.partition("/")
        if kind == "gradient_norm":
            return cls(step, TensorKind.GRADIENT, kind)
        return cls(
            step,
            TensorKind(kind) if name and kind in set(TensorKind) else TensorKind.FORWARD,
            name or kind,
        )

    @property
    def unit(self) -> int | None:
        """The unit it belongs to: 0 is the embedding, then the blocks, then the head."""
        unit = self.name.partition(".")[0]
        return int(unit) if unit.isdecimal() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleDifference:
    """How one tensor of the two dumps differs."""

    key: str
    cosine: float
    max_abs: float
    relative_l2: float
    tolerance: float
    norm: float  # of side A, per number
    values: tuple[float, float] | None = None  # of A and B, of a single number
    is_noise: bool = False  # further apart than allowed, were it not so small

    @property
    def diverges(self) -> bool:
        """Whether it is further apart than its format explains (also if a side is not finite)."""
        return not self.relative_l2 <= self.tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two dumps beside each other, in the order of execution."""

    a: DumpFacts
    b: DumpFacts
    modules: tuple[ModuleDifference, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    noise: tuple[str, ...] = ()  # whose weights are not compared: their gradients are rounding

    @property
    def first_divergence(self) -> ModuleDifference | None:
        """The first module, in the order of execution, that diverges."""
        return next((module for module in self.modules if module.diverges), None)

    @property
    def losses(self) -> tuple[tuple[int, float, float], ...]:
        """The steps of two training runs with the loss of each."""
        return tuple(
            (Key.parse(module.key).step or 0, *module.values)
            for module in self.modules
            if module.key.endswith("/loss") and module.values is not None
        )

    @property
    def worst(self) -> ModuleDifference:
        """The module that is closest to, or furthest beyond, what it may differ."""
        return max(self.modules, key=lambda m: _share(m.relative_l2, m.tolerance))


def _share(value: float, tolerance: float) -> float:
    return math.inf if math.isnan(value) else value / tolerance


def compare(a: Path, b: Path, *, tolerance: float | None = None) -> Comparison:
    """Compare two dump folders."""
    left, right = Dump(a), Dump(b)
    _check_comparable(left, right)
    keys = [key for key in left.tensors if key in right.tensors and not key.startswith("input/")]
    if not keys:
        raise InputError(f"{a} and {b}: the dumps have no module in common")
    modules, noise = _differences(left, right, keys, tolerance)
    return Comparison(
        a=left.facts,
        b=right.facts,
        modules=modules,
        only_a=tuple(key for key in left.tensors if key not in right.tensors),
        only_b=tuple(key for key in right.tensors if key not in left.tensors),
        noise=noise,
    )


def _differences(
    left: Dump, right: Dump, keys: list[str], tolerance: float | None
) -> tuple[tuple[ModuleDifference, ...], tuple[str, ...]]:
    """Return how tensors differ, and whose weights say nothing: their gradients are noise."""
    largest = _largest_gradients(left, keys)
    noise: dict[str, None] = {}
    differing = []
    for key in keys:
        parsed = Key.parse(key)
        if parsed.kind is TensorKind.WEIGHT and parsed.name in noise:
            continue
        module = _difference(left, right, key, largest.get(parsed.step, 0.0), tolerance)
        differing.append(module)
        if parsed.kind is TensorKind.GRADIENT and module.is_noise and not module.diverges:
            noise[parsed.name] = None
    return tuple(differing), tuple(noise)


def _check_comparable(left: Dump, right: Dump) -> None:
    a, b = left.facts, right.facts
    if a.model_hash != b.model_hash:
        raise InputError(
            f"{right.folder}: is of another model: {left.folder} ran '{a.model}' ({a.model_type}, "
            f"{a.model_hash}), it '{b.model}' ({b.model_type}, {b.model_hash})"
        )
    if a.steps != b.steps:
        raise InputError(
            f"{right.folder}: {left.folder} ran {a.steps} steps of training, it {b.steps}; give "
            "both the same --steps"
        )
    if a.batch_sha256 != b.batch_sha256:
        raise InputError(
            f"{right.folder}: is of another batch: {left.folder} ran {a.sequences} × {a.length} "
            f"tokens of seed {a.seed}, it {b.sequences} × {b.length} of seed {b.seed}"
        )
    for key, recorded in left.tensors.items():
        other = right.tensors.get(key)
        if other is not None and other.shape != recorded.shape:
            raise InputError(
                f"{right.folder}: '{key}': expected {list(recorded.shape)} as in {left.folder}, "
                f"found {list(other.shape)}"
            )


def _largest_gradients(dump: Dump, keys: list[str]) -> dict[int | None, float]:
    """Return the largest root mean square of side A's gradients, by step."""
    largest: dict[int | None, float] = {}
    for key in keys:
        parsed = Key.parse(key)
        if parsed.kind is TensorKind.GRADIENT and parsed.unit is not None:
            size = _root_mean_square(dump.numbers(key))
            largest[parsed.step] = max(size, largest.get(parsed.step, 0.0))
    return largest


def _root_mean_square(numbers: NDArray[np.float64]) -> float:
    return float(np.sqrt(np.mean(numbers**2))) if numbers.size else 0.0


def _difference(
    left: Dump, right: Dump, key: str, largest: float, tolerance: float | None
) -> ModuleDifference:
    a, b = left.numbers(key), right.numbers(key)
    parsed = Key.parse(key)
    norms = float(np.linalg.norm(a)), float(np.linalg.norm(b))
    floor = NOISE * largest * math.sqrt(a.size) if parsed.kind is TensorKind.GRADIENT else 0.0
    scale = max(*norms, floor)
    allowed = tolerance if tolerance is not None else _allowed(left, right, key, parsed)
    with np.errstate(invalid="ignore"):
        distance = float(np.linalg.norm(a - b))
        max_abs = float(np.max(np.abs(a - b), initial=0.0))
        product = float(a @ b)
    return ModuleDifference(
        key=key,
        cosine=product / (norms[0] * norms[1]) if norms[0] * norms[1] else 1.0,
        max_abs=max_abs,
        relative_l2=0.0 if distance == 0 else distance / scale if scale else math.inf,
        tolerance=allowed,
        norm=_root_mean_square(a),
        values=(float(a[0]), float(b[0])) if a.size == 1 else None,
        is_noise=distance > allowed * max(norms),
    )


def _allowed(left: Dump, right: Dump, key: str, parsed: Key) -> float:
    """Return the tolerance of the coarsest format that either side computed in or recorded."""
    formats = (
        left.facts.dtype,
        right.facts.dtype,
        left.tensors[key].dtype,
        right.tensors[key].dtype,
    )
    table = _table(parsed)
    return max(table.get(name, 0.0) for name in formats)


def _table(key: Key) -> Mapping[str, float]:
    """Return what a tensor may differ by in each format."""
    if key.kind is TensorKind.WEIGHT:
        return WEIGHT_TOLERANCE
    if key.kind is TensorKind.FORWARD:
        return FORWARD_TOLERANCE
    later = key.unit is not None and (key.step or 0) > 1
    return LATER_GRADIENT_TOLERANCE if later else GRADIENT_TOLERANCE
