"""What the classes of one schedule look up together: groups, boundaries, collective programs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tutti.collective import Operation
from tutti.cost.memory.rank_state import HolderIndex, RankState
from tutti.cost.network.group_links import GroupLinks, group_links
from tutti.cost.network.group_placement import Placement, placement_of
from tutti.cost.network.host_memory_traffic import HostMemory
from tutti.cost.network.program_choice import Choice, Efficiency, choose_program, price_named
from tutti.cost.network.reach import group_limits, limits_of
from tutti.cost.network.recorded_programs import Asked, GroupKind, Recorded, require_runnable
from tutti.cost.network.stage_boundaries import BoundaryPrice, SharedTiers, boundary_price
from tutti.cost.plan.equal_instructions import Kinds
from tutti.cost.plan.gradient_groups import Groups
from tutti.cost.plan.pool_prices import PoolPrices
from tutti.cost.plan.step_memo import PlacedStage, StepMemo, sequences_of
from tutti.hardware.cluster import Cluster
from tutti.hardware.topology import Position
from tutti.models.parameters import ParameterClass
from tutti.models.spec import ModelSpec
from tutti.ownership.elements import RankElements
from tutti.ownership.shard_overlaps import shared_cuts
from tutti.plan.plan import CollectiveUse, Plan, RankMap, Replica, Stage, chunks
from tutti.schedule.boundary import Boundary
from tutti.schedule.instruction import Instruction, What
from tutti.schedule.schedule import Schedule


class StepContext:
    """Look-ups that the prices of all classes share."""

    def __init__(
        self,
        schedule: Schedule,
        model: ModelSpec,
        cluster: Cluster,
        prices: Mapping[str, PoolPrices],
        memo: StepMemo | None = None,
    ) -> None:
        network_lasts = group_limits(cluster) is None and not schedule.plan.collectives
        self._memo = (memo or StepMemo()).of_plan(network_lasts=network_lasts)
        self.schedule = schedule
        self.plan: Plan = schedule.plan
        self._placed: dict[int, PlacedStage] = {}
        self.job = replace(schedule.plan.job, global_batch=1)  # what prices depend on
        self.model = model
        self.cluster = cluster
        self.prices = prices
        self.index = HolderIndex(schedule.plan)
        self.elements = RankElements(schedule.plan, model, schedule.buckets, self._memo.elements)
        self.ranks = RankMap(schedule.plan)
        self.host = HostMemory(schedule.plan, cluster, self.index)
        self.groups = Groups(
            schedule.plan, cluster, self.index, self.host, self._memo.groups, self.placed
        )
        self._recorded = Recorded(schedule.plan)
        self._pairs: dict[tuple[int, int], BoundaryPrice] = {}  # by sender and receiver
        self._wires: dict[tuple[int, int, What], BoundaryPrice] = {}  # of the same, by place
        self._shared: SharedTiers | None = None
        self._final: dict[object, tuple[tuple[tuple[Position, ...], int], ...]] = {}

    def placed(self, stage: Stage) -> PlacedStage:
        """Return what the prices of other stages depend on of one of the plan's."""
        known = self._placed.get(id(stage))
        if known is None:
            known = self._placed[id(stage)] = PlacedStage.of(stage)
        return known

    def placement(self, replica: Replica) -> Placement:
        """Return how the worst copy of a replica lies on its nodes."""
        known, key = self._memo.placements, (replica.chips, replica.count, replica.tp, replica.cp)
        if key not in known:
            node = self.cluster.pool(replica.chips.pools[0]).node
            known[key] = placement_of(replica, node)
        return known[key]

    def boundary(self, pipeline: int, unit: int, what: What) -> BoundaryPrice:
        """Return what one micro-batch takes over a boundary."""
        place = (pipeline, unit, what)
        if place not in self._wires:
            self._wires[place] = self._boundary_price(*place)
        return self._wires[place]

    def _boundary_price(self, pipeline: int, unit: int, what: What) -> BoundaryPrice:
        wire = self.schedule.boundary(pipeline, unit, what)
        ends = (wire.sender, wire.receiver)
        pair = (id(wire.sender), id(wire.receiver))  # of the plan, which lasts
        if pair not in self._pairs:
            self._pairs[pair] = self._pair_price(wire, ends)
        return self._pairs[pair]

    def _pair_price(self, wire: Boundary, ends: tuple[Stage, Stage]) -> BoundaryPrice:
        key = (*((self.placed(side), sequences_of(side)) for side in ends), self.host.sharing)
        known = self._memo.boundaries
        if key not in known:
            pools = tuple(pool for side in ends for pool in side.chips.pools)
            known[key] = boundary_price(
                wire,
                self.cluster,
                self.model.hidden * self.plan.job.precision.stream.num_bytes,
                self.efficiency(pools),
                host_bandwidth=min(self.host.lane_bandwidth(side.chips) for side in ends),
                shared=self._shared_tiers(),
            )
        return known[key]

    def _shared_tiers(self) -> SharedTiers | None:
        """Return what all boundaries share of tiers that limit; None where none does."""
        limits = limits_of(self.cluster)
        if self._shared is None and limits is not None:
            length = self.plan.job.sequence_length
            ends = {
                (id(one), id(two)): Boundary(one, two, length)
                for pipeline in self.plan.pipelines
                for lower, upper in itertools.pairwise(chunks(pipeline))
                for one, two in [(pipeline.stages[lower.stage], pipeline.stages[upper.stage])]
                if one is not two
            }
            self._shared = SharedTiers(limits, ends.values())
        return self._shared

    def kinds(self, instructions: Sequence[Instruction], rank_state: RankState | None) -> Kinds:
        """Return the kinds of a list; classes that share the list share them.

        With what a rank holds, units that are alike for it are not told apart.
        """
        known, joined = self._memo.kinds, self._memo.joined
        if id(instructions) not in known:
            known[id(instructions)] = Kinds.of(instructions)
        kinds = known[id(instructions)]
        if rank_state is None:
            return kinds
        numbers: dict[object, int] = {}
        units = (unit for start, stop in rank_state.stage.units for unit in range(start, stop))
        alike = tuple(numbers.setdefault(rank_state.likeness(u), len(numbers)) for u in units)
        key = (id(instructions), rank_state.stage.units, alike)
        if key not in joined:
            joined[key] = kinds.joined(rank_state.likeness)
        return joined[key]

    def efficiency(self, pools: tuple[str, ...]) -> Efficiency:
        """Return that of the pool which makes least of the fabric: all go at its pace."""
        return min((self.prices[pool].efficiency for pool in pools), key=lambda known: known.fabric)

    def links(self, chips: tuple[Position, ...]) -> GroupLinks:
        """Return the group of a few chips, made once."""
        known = self._memo.links
        if chips not in known:
            known[chips] = group_links(self.cluster, chips, self.groups.crossers)
        return known[chips]

    def choose(
        self, use: CollectiveUse, operation: Operation, num_bytes: float, links: GroupLinks
    ) -> Choice:
        """Return the program of a collective: as the plan records it, else the cheapest."""
        return self.ask(use, operation, num_bytes, links).choice

    def ask(
        self, use: CollectiveUse, operation: Operation, num_bytes: float, links: GroupLinks
    ) -> Asked:
        """Return a collective with its program and what it was priced by."""
        key = (use, operation, num_bytes, id(links))
        known = self._memo.chosen
        if key not in known:
            known[key] = self._asked(use, operation, num_bytes, links)
        return known[key]

    def _asked(
        self, use: CollectiveUse, operation: Operation, num_bytes: float, links: GroupLinks
    ) -> Asked:
        efficiency = self.efficiency(links.pools)
        args = (operation, num_bytes, links, efficiency)
        kind = GroupKind.of(links)
        entry = self._recorded.find(use, operation, kind, num_bytes)
        if entry is None:
            return Asked(use, *args, choose_program(*args))
        require_runnable(entry, links.group, kind)
        named = price_named(*args, entry.algorithm, entry.chunks)
        return Asked(use, *args, named, entry.channels)

    def final_reductions(
        self, unit: int, kind: ParameterClass, rank_state: RankState
    ) -> tuple[tuple[tuple[Position, ...], int], ...]:
        """Return with which chips of other pipelines a rank sums up its shard of a bucket.

        Each with the number of elements; they may be few chips of a pipeline that cuts coarsely,
        or many of one that cuts finely.
        """
        bucket = self.elements.bucket(unit)
        start, stop = bucket.span(kind)
        alike = tuple(map(rank_state.likeness, range(start, stop)))
        key = (alike, kind, rank_state.place)
        if key not in self._final:
            lines = self.elements.ownership.by_pipeline(bucket, kind)
            rank = self.ranks.first_rank(*rank_state.place[:2]) + rank_state.stage_rank
            self._final[key] = tuple(
                (
                    tuple(self.ranks.place(member).chip for member in ranks),
                    sum(cut.stop - cut.start for cut in cuts),
                )
                for ranks, cuts in shared_cuts(lines, rank).items()
                if len(ranks) > 1
            )
        return self._final[key]
