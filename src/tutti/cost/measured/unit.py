"""Seconds of a unit on a measured chip: the sum of its operators, pass by pass and part by part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tutti.cost.arrays import FloatArray, Strategy
from tutti.cost.measured.calls import Call, operators_of, unit_calls
from tutti.cost.measured.chip import MeasuredChip
from tutti.cost.measured.forms import FORMS, PRODUCT, Direction, Part, row_name
from tutti.cost.operators.operator_times import Passes
from tutti.errors import InputError
from tutti.hardware.chip import Dtype
from tutti.hardware.profile import Profile
from tutti.models.operators import Workload
from tutti.models.spec import ModelSpec

PARTS: tuple[Part, ...] = ("gemm", "attention", "elementwise")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeasuredUnit:
    """The passes of a unit, and the host's time to issue them."""

    parts: dict[Part, Passes]
    issue_forward_s: FloatArray
    issue_backward_s: FloatArray
    graph_share: float = 1.0  # of these times, where the unit runs as a graph

    @property
    def total(self) -> Passes:
        """All parts together, as if the host were never late."""
        gemm, attention, elementwise = (self.parts[part] for part in PARTS)
        return gemm.plus(attention).plus(elementwise)

    def both(self, part: Part) -> tuple[FloatArray, FloatArray]:
        """Return forward and backward of a part."""
        return self.parts[part].forward, self.parts[part].backward

    @property
    def forward_s(self) -> FloatArray:
        """Forward, no faster than the host issues it."""
        return np.maximum(self.total.forward, self.issue_forward_s)

    @property
    def backward_s(self) -> FloatArray:
        """Backward, no faster than the host issues it."""
        return np.maximum(self.total.backward, self.issue_backward_s)


def measured_unit(
    chip: MeasuredChip, calls: Sequence[Call], *, made_once: bool = False
) -> MeasuredUnit:
    """Return what the operators of a unit take.

    Profiles hold gradients of weights that are added to sums in fp32. One that is `made_once` is
    written in the weights' own format: as many products and bytes as the gradient of the input.
    """
    nothing: FloatArray = np.zeros(())
    parts: dict[Part, Passes] = {part: Passes(nothing, nothing, nothing) for part in PARTS}
    issued = [nothing, nothing]
    for call in calls:
        operator = chip.operator_of(call)
        form = FORMS[operator]
        back = call.times if call.backward_times is None else call.backward_times
        forward: FloatArray = call.times * chip.seconds(operator, "forward", call.dims)
        by_input: FloatArray = nothing
        by_weight: FloatArray = nothing
        if form.directions == PRODUCT:
            by_input = back * chip.seconds(operator, "input_gradient", call.dims)
            by_weight = (
                by_input
                if made_once
                else (back * chip.seconds(operator, "weight_gradient", call.dims))
            )
        else:
            returning: Direction = "backward" if "backward" in form.directions else "forward"
            joins = operator != "linear_cross_entropy" or not made_once  # forward made it
            seconds = joins * back * chip.seconds(operator, returning, call.dims)
            by_input, by_weight = (nothing, seconds) if form.weighs else (seconds, nothing)
        slower = chip.profile.sustained if form.part == "gemm" else 1.0
        parts[form.part] = parts[form.part].plus(Passes(forward, by_input, by_weight), slower)
        issued[0] = issued[0] + call.times * chip.issue_s(operator, "forward")
        issued[1] = issued[1] + back * sum(
            chip.issue_s(operator, direction)
            for direction in (form.directions[1:] or form.directions)
        )
    return MeasuredUnit(
        parts=parts,
        issue_forward_s=issued[0],
        issue_backward_s=issued[1],
        graph_share=chip.profile.graph_share,
    )


def strategy_of(work: Workload) -> Strategy:
    """Return a workload as the strategy of one rank."""
    return Strategy.filled(
        sequence_length=work.sequence_length,
        sequences=work.sequences,
        tp=work.tp,
        cp=work.cp,
        ep=work.ep,
        sequence_parallel=float(work.sequence_parallel),
    )


def unit_shapes(spec: ModelSpec, unit: int, work: Workload) -> set[tuple[str, tuple[int, ...]]]:
    """Return the (operator, shape) rows of a profile that a unit's calls are exactly."""
    return {
        (row_name(operator, direction), tuple(round(float(d)) for d in call.dims))
        for call in unit_calls(spec, unit, strategy_of(work))
        for operator in operators_of(call)
        for direction in FORMS[operator].directions
    }


def unmeasured(spec: ModelSpec, chip: MeasuredChip, work: Workload) -> tuple[str, ...]:
    """Return which sizes of which of a model's operators lie outside a chip's profile."""
    kinds = {spec.unit_kind(unit): unit for unit in range(spec.num_units)}
    strategy = strategy_of(work)
    lines = {
        f"profile: {line}": None
        for unit in kinds.values()
        for call in unit_calls(spec, unit, strategy)
        for line in chip.outside(chip.operator_of(call), call.dims)
    }
    return tuple(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPrediction:
    """What one block is predicted to take on one chip, in seconds."""

    forward: float
    backward: float
    parts: dict[str, float]  # products, attention, the rest; both passes
    outside: tuple[str, ...]  # what lies outside the measured shapes

    @property
    def total(self) -> float:
        """Both passes."""
        return self.forward + self.backward


def predict_block(
    profile: Profile | MeasuredChip,
    spec: ModelSpec,
    work: Workload,
    *,
    dtype: Dtype = Dtype.BF16,
    unit: int = 1,
) -> BlockPrediction:
    """Return forward and backward of one unit of a model, from a profile alone."""
    if not 0 <= unit <= spec.head_unit:
        raise InputError(f"{spec.name}: there is no unit {unit}; units are 0 to {spec.head_unit}")
    chip = profile if isinstance(profile, MeasuredChip) else MeasuredChip(profile, dtype)
    calls = unit_calls(spec, unit, strategy_of(work))
    measured = measured_unit(chip, calls)
    outside = dict.fromkeys(
        line for call in calls for line in chip.outside(chip.operator_of(call), call.dims)
    )
    return BlockPrediction(
        forward=float(measured.forward_s),
        backward=float(measured.backward_s),
        parts={name: float(p.forward + p.backward) for name, p in measured.parts.items()},
        outside=tuple(outside),
    )
