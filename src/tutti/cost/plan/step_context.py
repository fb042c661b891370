"""What the classes of one schedule look up together: groups, boundaries, collective programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tutti.collective import Operation
from tutti.cost.memory.rank_state import HolderIndex
from tutti.cost.network.group_links import GroupLinks, group_links
from tutti.cost.network.host_memory_traffic import HostMemory
from tutti.cost.network.programs import Choice, Efficiency, choose_program, price_named
from tutti.cost.network.recorded_programs import Asked, Recorded, Use
from tutti.cost.network.stage_boundaries import BoundaryPrice, boundary_price
from tutti.cost.plan.equal_instructions import Kinds
from tutti.cost.plan.final_reduction import Meeting, Place, closing_meeting, shard_runs
from tutti.cost.plan.gradient_groups import Groups
from tutti.cost.plan.pool_prices import PoolPrices
from tutti.hardware.cluster import Cluster
from tutti.hardware.topology import Position
from tutti.models.parameters import ParameterClass
from tutti.models.spec import ModelSpec
from tutti.plan.plan import Plan
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
    ) -> None:
        self.schedule = schedule
        self.plan: Plan = schedule.plan
        self.model = model
        self.cluster = cluster
        self.prices = prices
        self.index = HolderIndex(schedule.plan)
        self.host = HostMemory(schedule.plan, cluster, self.index)
        self.groups = Groups(schedule.plan, cluster, self.index, self.host)
        self._kinds: dict[int, Kinds] = {}  # by the list, which the schedule keeps
        self._recorded = Recorded(schedule.plan)
        self._boundaries: dict[tuple[int, int], BoundaryPrice] = {}
        self._links: dict[tuple[Position, ...], GroupLinks] = {}
        self._chosen: dict[tuple[Use, Operation, float, int], tuple[GroupLinks, Choice]] = {}
        self._meetings: dict[tuple[int, ParameterClass, int, Place], Meeting | None] = {}

    def boundary(self, pipeline: int, unit: int, what: What) -> BoundaryPrice:
        """Return what one micro-batch takes over a boundary."""
        wire = self.schedule.boundary(pipeline, unit, what)
        ends = (wire.sender, wire.receiver)
        key = (id(wire.sender), id(wire.receiver))  # of the plan, which lasts
        if key not in self._boundaries:
            pools = tuple(pool for side in ends for pool in side.chips.pools)
            self._boundaries[key] = boundary_price(
                wire,
                self.cluster,
                self.model.hidden * self.plan.job.precision.stream.num_bytes,
                self.efficiency(pools),
                host_bandwidth=min(self.host.lane_bandwidth(side.chips) for side in ends),
            )
        return self._boundaries[key]

    def kinds(self, instructions: Sequence[Instruction]) -> Kinds:
        """Return the kinds of a list; classes that share the list share them."""
        if id(instructions) not in self._kinds:
            self._kinds[id(instructions)] = Kinds.of(instructions)
        return self._kinds[id(instructions)]

    def efficiency(self, pools: tuple[str, ...]) -> Efficiency:
        """Return that of the pool which makes least of the fabric: all go at its pace."""
        return min((self.prices[pool].efficiency for pool in pools), key=lambda found: found.fabric)

    def links(self, chips: tuple[Position, ...]) -> GroupLinks:
        """Return the group of a few chips, made once."""
        if chips not in self._links:
            self._links[chips] = group_links(self.cluster, chips)
        return self._links[chips]

    def choose(self, use: Use, operation: Operation, num_bytes: float, links: GroupLinks) -> Choice:
        """Return the program of a collective: as the plan records it, else the cheapest."""
        key = (use, operation, num_bytes, id(links))
        if key not in self._chosen:
            self._chosen[key] = (links, self._choice(use, operation, num_bytes, links))
        return self._chosen[key][1]

    def _choice(
        self, use: Use, operation: Operation, num_bytes: float, links: GroupLinks
    ) -> Choice:
        efficiency = self.efficiency(links.pools)
        entry = self._recorded.find(use, operation, links.pools, num_bytes)
        if entry is not None:
            args = (operation, num_bytes, links, efficiency)
            named = price_named(*args, entry.algorithm, entry.chunks)
            if named is not None:
                return named
        return choose_program(operation, num_bytes, links, efficiency)

    def asked(self) -> list[Asked]:
        """Return every collective that was priced, with its program."""
        return [
            Asked(use, operation, links.pools, size, choice.algorithm, choice.chunks)
            for (use, operation, size, _), (links, choice) in self._chosen.items()
            if choice.algorithm != "none"
        ]

    def closing(self, unit: int, kind: ParameterClass, place: Place) -> Meeting | None:
        """Return who of the other pipelines holds what a rank's shard of a unit overlaps."""
        rule, holders = self.plan.synchronisation_of(unit, kind), self.index.of(unit)
        key = (id(holders), kind, id(rule), place)
        if key not in self._meetings:
            self._meetings[key] = closing_meeting(shard_runs(holders, kind, rule), place)
        return self._meetings[key]
