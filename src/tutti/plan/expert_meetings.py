"""Where the chips of an expert group meet: recomputing a layer of experts exchanges tokens again.

All chips of a group do that for a unit, or none does; otherwise some would wait for ever.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from tutti.models.spec import ModelSpec
from tutti.plan.plan import ExpertGroup, UnitRanges, covers


class Missed(NamedTuple):
    """A unit that one of two neighbouring groups of replicas recomputes, inside an expert group."""

    first: int  # group of replicas, counted from 0
    second: int
    unit: int


def missed_meeting(
    holders: Sequence[tuple[int, UnitRanges]],
    groups: Sequence[ExpertGroup],
    units: UnitRanges,
    model: ModelSpec,
) -> Missed | None:
    """Return where an expert group would miss some of its members; None where all meet.

    `holders` are the chips of each group of replicas of a stage, in their order, and the units that
    it recomputes in full.
    """
    sparse = [
        unit
        for unit in range(1, model.num_layers + 1)
        if covers(units, unit) and model.block(unit).moe is not None
    ]
    again = [frozenset(u for u in sparse if covers(full, u)) for _, full in holders]
    if len(set(again)) == 1:
        return None
    ends = itertools.accumulate(chips for chips, _ in holders)
    for number, (end, (one, other)) in enumerate(
        zip(ends, itertools.pairwise(again), strict=False)
    ):
        if one != other and _straddled(end, groups):
            return Missed(number, number + 1, min(one ^ other))
    return None


def _straddled(chip: int, groups: Sequence[ExpertGroup]) -> bool:
    """Tell whether an expert group has chips on both sides of the one before `chip`."""
    start = 0
    for group in groups:
        span = group.chips * group.count
        if chip < start + span:
            return (chip - start) % group.chips != 0
        start += span
    return False
