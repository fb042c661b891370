"""Who reduces a unit's gradients with whom, and how long the chosen program takes for it."""

from __future__ import annotations

from collections.abc import Iterator

from tutti.collective import Operation
from tutti.cost.holdings import HolderIndex
from tutti.cost.links import GroupLinks, group_links
from tutti.cost.programs import Choice, Efficiency, choose_program
from tutti.hardware.cluster import Cluster
from tutti.hardware.topology import Position
from tutti.models.parameters import ParameterClass
from tutti.plan.plan import Plan, Stage
from tutti.schedule.instruction import Instruction, Op, Scope


class Groups:
    """The groups of a plan's synchronisation, made once each."""

    def __init__(self, plan: Plan, cluster: Cluster, index: HolderIndex) -> None:
        self._plan = plan
        self._index = index
        self._cluster = cluster
        self._known: dict[object, GroupLinks | None] = {}

    def of(self, unit: int, kind: ParameterClass, pipeline: int | None) -> GroupLinks | None:
        """Return one group that shares parameters of a unit (its tensor slices have their own).

        Every tensor position reduces with its peers over links of its own, so one of them stands
        for all; within a pipeline, or across all of them. None where the pipeline spreads no
        experts, and so holds them among its dense parameters.
        """
        found = self._index.of(unit)
        key = (kind, id(found), pipeline)
        if key not in self._known:
            holders = [held for held in found if pipeline in (None, held[0])]
            chips = [chip for _, _, stage in holders for chip in _sharing(stage, kind)]
            self._known[key] = group_links(self._cluster, chips) if chips else None
        return self._known[key]

    def everyone(self) -> int:
        """The number of ranks."""
        return self._plan.num_ranks


def _sharing(stage: Stage, kind: ParameterClass) -> Iterator[Position]:
    if kind is ParameterClass.EXPERT:
        chips, position = stage.chips, 0
        for group in stage.experts:
            for _ in range(group.count):
                yield chips.at(position)
                position += group.chips
        return
    for replica in stage.replicas:
        for copy in range(replica.count):
            for cp in range(replica.cp):
                yield replica.chips.at(copy * replica.width + cp * replica.tp)


def operation_of(entry: Instruction, level: int) -> Operation:
    """Return which collective an instruction is, for parameters of a shard level."""
    if entry.op is Op.GATHER_PARAMETERS:
        return Operation.ALL_GATHER
    if level == 0 or (level >= 2 and entry.scope is Scope.ALL):
        return Operation.ALL_REDUCE
    return Operation.REDUCE_SCATTER


def collective_choice(
    groups: Groups,
    entry: Instruction,
    *,
    pipeline: int,
    level: int,
    num_bytes: float,
    efficiency: Efficiency,
) -> Choice:
    """Return the program for a gather or a reduction, with its seconds."""
    kind = ParameterClass(entry.what.value)
    scope = pipeline if entry.scope is Scope.PIPELINE else None
    links = groups.of(entry.start, kind, scope)
    if links is None:
        return Choice(algorithm="none", chunks=1, seconds=0.0)
    operation = operation_of(entry, level)
    return choose_program(operation, num_bytes, links, efficiency)
