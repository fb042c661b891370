"""What look-ups of earlier plans still answer: ownership, groups, boundaries, kinds, programs.

Keys hold by value what an answer depends on. Where the fabric's tiers limit anybody, groups and
boundaries depend on the whole plan, and only the other answers last.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from tutti.cost.network.group_links import GroupLinks
from tutti.cost.network.group_placement import Placement
from tutti.cost.network.recorded_programs import Asked
from tutti.cost.network.stage_boundaries import BoundaryPrice
from tutti.cost.plan.equal_instructions import Kinds
from tutti.ownership.elements import Elements

if TYPE_CHECKING:
    from tutti.hardware.topology import Position
    from tutti.plan.chips import ChipSet
    from tutti.plan.plan import ExpertGroup, Stage


class PlacedReplica(NamedTuple):
    """What the prices of other stages depend on: not what a replica recomputes or offloads."""

    chips: ChipSet
    copies: int
    tp: int
    cp: int
    sequence_parallel: bool


class PlacedStage(NamedTuple):
    """Where a stage lies and how it slices."""

    replicas: tuple[PlacedReplica, ...]
    experts: tuple[ExpertGroup, ...]

    @classmethod
    def of(cls, stage: Stage) -> PlacedStage:
        """Return what of a stage others depend on."""
        replicas = (
            PlacedReplica(r.chips, r.count, r.tp, r.cp, r.sequence_parallel) for r in stage.replicas
        )
        return cls(tuple(replicas), stage.experts)


def sequences_of(stage: Stage) -> tuple[int, ...]:
    """Return what each copy of a stage's replicas takes of a micro-batch."""
    return tuple(replica.sequences for replica in stage.replicas)


@dataclass(slots=True)
class StepMemo:
    """Answers to look-ups of plans for one model, cluster and sources."""

    elements: dict[object, Elements] = field(default_factory=dict)
    kinds: dict[int, Kinds] = field(default_factory=dict)  # by the list, which the kinds keep
    joined: dict[object, Kinds] = field(default_factory=dict)
    groups: dict[object, GroupLinks | None] = field(default_factory=dict)
    links: dict[tuple[Position, ...], GroupLinks] = field(default_factory=dict)
    chosen: dict[object, Asked] = field(default_factory=dict)  # by group, which the others keep
    boundaries: dict[object, BoundaryPrice] = field(default_factory=dict)
    placements: dict[object, Placement] = field(default_factory=dict)

    def of_plan(self, *, network_lasts: bool) -> StepMemo:
        """Return what the look-ups of one plan may use, and add to."""
        if network_lasts:
            return self
        return StepMemo(
            elements=self.elements,
            kinds=self.kinds,
            joined=self.joined,
            placements=self.placements,
        )

    def clear(self) -> None:
        """Forget everything: answers refer to each other."""
        self.elements, self.kinds, self.joined = {}, {}, {}
        self.groups, self.links, self.chosen, self.boundaries = {}, {}, {}, {}
