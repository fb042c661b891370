"""A chip as its profile measured it: seconds of operators at any shape.

`MeasuredChip` groups a profile's rows of one number format into curves. What was not measured is
priced by what stands nearest to it: an operator over elements by the chip's memory copies, grouped
products by single ones; `MeasuredChip.stand_ins` and `outside` say so. Of fp8 only the products
that a block makes in 8 bits are other operators; everything around them is bf16.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tutti.cost.arrays import FloatArray, Number
from tutti.cost.measured.calls import Call
from tutti.cost.measured.curve import Curve
from tutti.cost.measured.forms import (
    FORMS,
    NARROW,
    Direction,
    row_added,
    row_elements,
    row_flops,
    row_name,
)
from tutti.errors import InputError
from tutti.hardware.chip import Dtype
from tutti.hardware.profile import OperatorTime, Profile

NEEDED = ("linear", "attention")  # nothing stands in for them
_ATTENTION_FEATURES = ("sequences × heads", "length", "heads per kv head", "head_dim", "value_dim")
# in profiles that do not hold it
_STANDS_IN = {
    "scored_attention": "attention",
    "sink_attention": "scored_attention",
    "biased_attention": "scored_attention",
}
SERVING = ("linear", "decode_attention", "chunk_attention", "sample")
_SINGLE = {"grouped_linear": "linear", "narrow_grouped_linear": "narrow_linear"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Pass:
    """One operator's pass: its roofline, its slowdowns over it, the host's time to issue it."""

    operator: str
    name: str  # of its rows
    curve: Curve
    flops_rate: float
    elements_rate: float
    sums_rate: float  # elements per second onto sums, after a product
    floor_s: float
    issue_s: float

    def roofline(self, dims: Sequence[Number]) -> FloatArray:
        compute = np.asarray(row_flops(self.name, dims)) / self.flops_rate
        memory = np.asarray(row_elements(self.name, dims)) / self.elements_rate
        added = np.asarray(row_added(self.name, dims)) / self.sums_rate
        bound: FloatArray = np.maximum(compute, memory) + added + self.floor_s
        return bound

    def seconds(self, dims: Sequence[Number]) -> FloatArray:
        columns = np.broadcast_arrays(*(np.asarray(d, dtype=np.float64) for d in dims))
        features = _logarithms(self.operator, columns)
        points = features.reshape(-1, features.shape[-1])
        unique, back = np.unique(points, axis=0, return_inverse=True)
        slowdown = self.curve.slowdowns(self.curve.clamped(unique))[back.ravel()]
        fitted: FloatArray = self.roofline(columns) * slowdown.reshape(columns[0].shape)
        return fitted


def _logarithms(operator: str, dims: Sequence[Number]) -> FloatArray:
    with np.errstate(divide="ignore"):
        logs = [np.log2(np.maximum(f, 1e-9)) for f in FORMS[operator].features(dims)]
    return np.stack(np.broadcast_arrays(*logs), axis=-1)


class MeasuredChip:
    """Seconds of operators in one number format, by a profile."""

    def __init__(self, profile: Profile, dtype: Dtype) -> None:
        self.narrow = dtype is Dtype.FP8
        dtype = Dtype.BF16 if self.narrow else dtype
        self.profile, self.dtype = profile, dtype
        rows: dict[str, list[OperatorTime]] = {}
        for row in profile.operators:
            if row.dtype is dtype:
                rows.setdefault(row.operator, []).append(row)
        self._rows = rows
        for operator in NEEDED:
            if row_name(operator, "forward") not in rows and not self.serves:
                raise InputError(_missing(profile, operator, dtype))
        if self.narrow and row_name(NARROW["linear"], "forward") not in rows:
            raise InputError(
                f"profile of {profile.chip}: has no products of 8 bits; measure it with tutti "
                "profile where the chip has such, or leave it out"
            )
        self._passes: dict[tuple[str, Direction], _Pass | None] = {}

    def without(self, shapes: Collection[tuple[str, tuple[int, ...]]]) -> MeasuredChip:
        """Return the same chip as if some operators' shapes had not been measured."""
        return MeasuredChip(self.profile.without(shapes), Dtype.FP8 if self.narrow else self.dtype)

    def operator_of(self, call: Call) -> str:
        """Return what a call runs here: a product may be made in 8 bits."""
        return NARROW[call.operator] if self.narrow and call.may_narrow else call.operator

    # --- seconds -----------------------------------------------------------------------------

    def seconds(self, operator: str, direction: Direction, dims: Sequence[Number]) -> FloatArray:
        """Return the seconds of an operator's pass; the dimensions may be arrays."""
        curve = self._pass(operator, direction)
        if curve is not None:
            return curve.seconds(dims)
        if direction == "inference" and direction not in FORMS[operator].directions:
            return self.seconds(operator, "forward", dims)
        if operator in _SINGLE:
            rows, out, wide, experts = dims
            single = _SINGLE[operator]
            return experts * self.seconds(single, direction, (rows / experts, out, wide))
        if operator in _STANDS_IN:
            return self.seconds(_STANDS_IN[operator], direction, dims)
        if operator == "linear_cross_entropy":
            if direction == "backward":  # the gradients were made in forward
                return np.zeros(np.broadcast(*dims).shape)
            every = [self.seconds("linear", d, dims) for d in FORMS["linear"].directions]
            return sum(every[1:], every[0])
        if FORMS[operator].part != "elementwise":
            if operator in NEEDED and direction == "forward":
                raise InputError(_missing(self.profile, operator, self.dtype))
            raise InputError(f"profile of {self.profile.chip}: no '{operator}.{direction}'")
        passes = (
            1.0 if direction in ("forward", "inference") else 1.6
        )  # backward also reads the gradient
        return self.memory(passes * FORMS[operator].elements(dims))

    def memory(self, elements: Number) -> FloatArray:
        """Return the seconds of moving so many elements through memory."""
        moved = np.asarray(elements) * self.dtype.num_bytes
        return moved / self.memory_bandwidth + self.profile.launch_floor_s

    def issue_s(self, operator: str, direction: Direction) -> float:
        """Return what the host needs to issue it; 0 where the host computes itself."""
        curve = self._pass(operator, direction)
        return curve.issue_s if curve is not None else self.profile.launch_floor_s

    # --- what is known -----------------------------------------------------------------------

    @property
    def serves(self) -> bool:
        """Whether the operators of servers were measured: steps are priced by them."""
        return all(row_name(name, "inference") in self._rows for name in SERVING)

    @functools.cached_property
    def memory_bandwidth(self) -> float:
        """Bytes per second through memory: the copies, else the fastest element-wise operator."""
        link = self.profile.link("memory")
        if link is not None:
            return link.bandwidth
        rates = [
            float(FORMS[name].elements(row.shape)) * self.dtype.num_bytes / row.seconds
            for full, rows in self._rows.items()
            if (name := full.partition(".")[0]) in FORMS and FORMS[name].part == "elementwise"
            for row in rows
        ]
        return max(rates, default=math.inf)

    @functools.cached_property
    def matrix_ceiling(self) -> float:
        """The best FLOP per second of any product."""
        return max(
            float(FORMS["linear"].flops(row.shape)) / row.seconds
            for direction in FORMS["linear"].directions
            for row in self._rows.get(row_name("linear", direction), ())
        )

    def expected_error(self, operator: str, direction: Direction) -> float:
        """Return the error to expect of a shape that was not measured, from those that were."""
        curve = self._pass(operator, direction)
        return curve.curve.expected_error if curve is not None else math.nan

    def stand_in(self, operator: str, direction: Direction = "forward") -> str | None:
        """Say what an operator is priced by if nobody measured it; None if somebody did."""
        if row_name(operator, direction) in self._rows:
            return None
        by = {**dict.fromkeys(_SINGLE, "single products"), **_STANDS_IN}
        by["linear_cross_entropy"] = "products"
        return f"{operator} was not measured: priced by {by.get(operator, 'memory traffic')}"

    def outside(self, operator: str, dims: Sequence[Number]) -> tuple[str, ...]:
        """Say which sizes of a call lie outside the measured ones; with arrays, if any does."""
        missing = self.stand_in(operator)
        if missing is not None:
            return (missing,)
        fitted = self._pass(operator, "forward")
        assert fitted is not None
        points = _logarithms(operator, dims)
        curve = fitted.curve
        outside = curve.outside(points.reshape(-1, points.shape[-1]))
        if not outside.any():
            return ()
        names = _feature_names(operator)
        lines = []
        for index in np.flatnonzero(outside.any(axis=0)):
            value = points.reshape(-1, points.shape[-1])[outside[:, index].argmax(), index]
            low, high = curve.low[index], curve.high[index]
            lines.append(
                f"{operator} {names[index]} {2**value:.4g} (measured {2**low:.4g} to {2**high:.4g})"
            )
        return tuple(lines)

    def _pass(self, operator: str, direction: Direction) -> _Pass | None:
        key = (operator, direction)
        if key not in self._passes:
            rows = self._rows.get(row_name(operator, direction))
            self._passes[key] = self._fit(operator, rows) if rows else None
        return self._passes[key]

    def _fit(self, operator: str, rows: Sequence[OperatorTime]) -> _Pass:
        form, floor = FORMS[operator], self.profile.launch_floor_s
        for row in rows:
            if len(row.shape) != len(form.dims):
                raise InputError(
                    f"profile of {self.profile.chip}: '{row.operator}' has the shape "
                    f"{list(row.shape)}; expected {', '.join(form.dims)}"
                )
        columns = list(np.asarray([row.shape for row in rows], dtype=np.float64).T)
        seconds = np.asarray([row.seconds for row in rows])
        name = rows[0].operator
        sums_rate = self.memory_bandwidth / self.dtype.num_bytes
        added = np.asarray(row_added(name, columns)) / sums_rate
        net = np.maximum(seconds - floor - added, 0.1 * seconds)
        fitted = _Pass(
            operator=operator,
            name=name,
            curve=Curve.flat(),
            flops_rate=float(np.max(row_flops(name, columns) / net)) or 1.0,
            elements_rate=float(np.max(row_elements(name, columns) / net)),
            sums_rate=sums_rate,
            floor_s=floor,
            issue_s=float(np.median([row.issue_s for row in rows])),
        )
        curve = Curve.of(_logarithms(operator, columns), seconds / fitted.roofline(columns))
        return replace(fitted, curve=curve)


def _missing(profile: Profile, operator: str, dtype: Dtype) -> str:
    """Say why a profile cannot price a model, and what to run."""
    start = f"profile of {profile.chip}: no '{operator}' in {dtype.value}"
    if dtype in profile.dtypes:
        return f"{start}: its time was over before; run tutti profile with a longer --budget"
    has = ", ".join(d.value for d in profile.dtypes) or "nothing"
    return f"{start}; it measured {has}; run tutti profile --dtype {dtype.value}"


def _feature_names(operator: str) -> tuple[str, ...]:
    """What the features are called; most are the dimensions themselves."""
    special = {
        **dict.fromkeys(_SINGLE, ("rows per expert", "out", "in", "experts")),
        **dict.fromkeys(("attention", *_STANDS_IN), _ATTENTION_FEATURES),
    }
    return special.get(operator, FORMS[operator].dims)
