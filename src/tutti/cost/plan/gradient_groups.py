"""Who reduces a unit's gradients with whom, and by which operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tutti.collective import Operation
from tutti.cost.memory.rank_state import HolderIndex
from tutti.cost.network.group_links import GroupLinks, group_links
from tutti.cost.network.host_memory_traffic import HostMemory
from tutti.cost.network.reach import Crossers, group_limits
from tutti.hardware.cluster import Cluster
from tutti.hardware.topology import Position
from tutti.models.parameters import ParameterClass
from tutti.plan.plan import Plan, Stage
from tutti.schedule.instruction import Instruction, Op, Scope


class Groups:
    """The groups of a plan's synchronisation, made once each."""

    def __init__(
        self,
        plan: Plan,
        cluster: Cluster,
        index: HolderIndex,
        host: HostMemory | None = None,
        lasting: dict[object, GroupLinks | None] | None = None,
        placed: Callable[[Stage], object] = id,
    ) -> None:
        """`lasting` are groups of other plans on this cluster; those made are added to them.

        `placed` says by value what of a stage its groups depend on.
        """
        self._placed = placed
        self._lasting = {} if lasting is None else lasting
        self._host = host
        self._plan = plan
        self._num_ranks = plan.num_ranks
        self._index = index
        self._cluster = cluster
        self._known: dict[object, GroupLinks | None] = {}
        self._crossers: Crossers | None = None

    @property
    def crossers(self) -> Crossers | None:
        """The chips whose gradients cross the fabric's tiers; None where nothing limits them.

        The stages' reductions meet at the end of a step, so that all of them count.
        """
        limits = group_limits(self._cluster)
        if self._crossers is None and limits is not None:
            last = max(stop for _, _, stage in self._plan.stages() for _, stop in stage.units)
            holders = {id(held): held for held in map(self._index.of, range(last))}
            self._crossers = limits.crossers(
                [stage.chips for _, _, stage in held] for held in holders.values()
            )
        return self._crossers

    def of(self, unit: int, kind: ParameterClass, pipeline: int | None) -> GroupLinks | None:
        """Return one group that shares parameters of a unit (its tensor slices have their own).

        Every tensor position reduces with its peers over links of its own, so one of them stands
        for all; within a pipeline, or across all of them. None where the pipeline spreads no
        experts, and so holds them among its dense parameters.
        """
        holding = self._index.of(unit)
        key = (kind, id(holding), pipeline)
        if key not in self._known:
            stages = [stage for p, _, stage in holding if pipeline in (None, p)]
            sharing = None if self._host is None else self._host.sharing
            expert = kind is ParameterClass.EXPERT
            value = (expert, tuple(map(self._placed, stages)), sharing)
            if value not in self._lasting:
                chips = [chip for stage in stages for chip in _sharing(stage, kind)]
                self._lasting[value] = self._made(chips, stages)
            self._known[key] = self._lasting[value]
        return self._known[key]

    def _made(self, chips: list[Position], stages: list[Stage]) -> GroupLinks | None:
        links = group_links(self._cluster, chips, self.crossers) if chips else None
        if links is None or self._host is None:
            return links
        return self._host.capped(links, stages)

    def every(
        self, unit: int, kind: ParameterClass, pipeline: int | None
    ) -> list[tuple[Position, ...]]:
        """Return the chips of all groups that share parameters of a unit, as `of` orders them.

        One group per tensor (or expert) position; a side with fewer positions meets several.
        """
        holders = [held for held in self._index.of(unit) if pipeline in (None, held[0])]
        stages = [stage for _, _, stage in holders]
        expert = kind is ParameterClass.EXPERT
        experts = [group.chips for stage in stages for group in stage.experts]
        tensors = [replica.tp for stage in stages for replica in stage.replicas]
        widths = experts if expert else tensors
        return [
            tuple(chip for stage in stages for chip in _sharing(stage, kind, position))
            for position in range(max(widths, default=0))
        ]

    def everyone(self) -> int:
        """The number of ranks."""
        return self._num_ranks


def _sharing(stage: Stage, kind: ParameterClass, at: int = 0) -> Iterator[Position]:
    if kind is ParameterClass.EXPERT:
        chips, position = stage.chips, 0
        for group in stage.experts:
            for _ in range(group.count):
                yield chips.at(position + min(at, group.chips - 1))
                position += group.chips
        return
    for replica in stage.replicas:
        for copy in range(replica.count):
            for cp in range(replica.cp):
                yield replica.chips.at(
                    copy * replica.width + cp * replica.tp + min(at, replica.tp - 1)
                )


def operation_of(entry: Instruction, level: int) -> Operation:
    """Return which collective an instruction is, for parameters of a shard level."""
    if entry.op is Op.GATHER_PARAMETERS:
        return Operation.ALL_GATHER
    if level == 0 or (level >= 2 and entry.scope is Scope.ALL):
        return Operation.ALL_REDUCE
    return Operation.REDUCE_SCATTER
