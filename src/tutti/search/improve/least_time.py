"""Seconds that a plan takes at the least: what its passes and messages take by themselves.

A class of ranks computes all its passes one after the other. The first of them begins when a
micro-batch has come forward through all stages before; when the last gradient is there it goes
back through all of them. A boundary carries one message after the other. What a step is predicted
to take is never less, so a plan for which this is too much already need not be simulated.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tutti.cost.kernels import Kernels
from tutti.cost.memory.rank_state import workload_of
from tutti.cost.network.group_placement import placement_of
from tutti.cost.network.reach import limits_of
from tutti.cost.network.stage_boundaries import boundary_price
from tutti.cost.plan.pool_prices import PoolPrices, UnitTimes
from tutti.cost.plan.step_memo import PlacedStage, sequences_of
from tutti.errors import InputError
from tutti.hardware.cluster import Cluster
from tutti.models.memory import Recompute
from tutti.models.spec import ModelSpec
from tutti.plan.plan import Pipeline, Plan, Replica, Stage, chunks, covers
from tutti.plan.schedules import schedule_record
from tutti.schedule.boundary import Boundary


class _Passes(NamedTuple):
    """Seconds of a micro-batch on a rank: of its unit ranges, and of all passes."""

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    whole: float  # recomputation, too


class _Ranges(NamedTuple):
    """What the slowest rank takes for each unit range of a path, in the path's order."""

    stages: tuple[int, ...]
    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    messages: tuple[float, ...]  # to the next range


@dataclass(slots=True)
class _Known:
    """Stages and boundaries that were seen before."""

    passes: dict[object, _Passes | None]
    messages: dict[object, float]


class LeastTime:
    """Least seconds of plans of one problem; stages seen before are not added up again."""

    def __init__(
        self,
        model: ModelSpec,
        cluster: Cluster,
        prices: Mapping[str, PoolPrices],
        kernels: Kernels,
    ) -> None:
        self._model = model
        self._cluster = cluster
        self._prices = prices
        self._kernels = kernels
        self._known = _Known({}, {})
        # What boundaries get of tiers that limit depends on all of them: then they count nothing.
        self._free_messages = limits_of(cluster) is not None

    def seconds(self, plan: Plan) -> float:
        """Return what a step takes at the least on a typical node; 0 where passes are unknown."""
        return max(self._pipeline(plan, pipeline) for pipeline in plan.pipelines)

    def _pipeline(self, plan: Plan, pipeline: Pipeline) -> float:
        passes: list[list[_Passes]] = []
        for stage in pipeline.stages:
            own = [self._passes(plan, pipeline, stage, replica) for replica in stage.replicas]
            known = [each for each in own if each is not None]
            if len(known) < len(own):
                return 0.0
            passes.append(known)
        path = self._path(plan, pipeline, passes)
        delays = schedule_record(plan.job.schedule).delays_weights
        longest = lead = back = 0.0
        begun: set[int] = set()
        for i, s in enumerate(path.stages):
            if s not in begun:
                begun.add(s)
                busy = max(_until_last_input(own, pipeline, delays=delays) for own in passes[s])
                whole = pipeline.micro_batches * max(own.whole for own in passes[s])
                after = back + path.backward_weight[0]
                longest = max(longest, lead + whole, lead + busy + after)
            lead += path.forward[i] + path.messages[i]
            back += path.backward_input[i] + path.messages[i]
        # One micro-batch goes there and back; all others follow it over the slowest boundary.
        once = lead + back + path.backward_weight[0]
        return max(longest, once + (pipeline.micro_batches - 1) * max(path.messages))

    def _path(self, plan: Plan, pipeline: Pipeline, passes: Sequence[Sequence[_Passes]]) -> _Ranges:
        path = chunks(pipeline)
        turns = [0] * len(pipeline.stages)
        figures: list[tuple[float, float, float]] = []
        for chunk in path:
            turn, own = turns[chunk.stage], passes[chunk.stage]
            turns[chunk.stage] += 1
            figures.append(
                (
                    max(each.forward[turn] for each in own),
                    max(each.backward_input[turn] for each in own),
                    max(each.backward_weight[turn] for each in own),
                )
            )
        ends = [pipeline.stages[chunk.stage] for chunk in path]
        sends = [self._message(plan, a, b) for a, b in itertools.pairwise(ends)]
        forward, inputs, weights = zip(*figures, strict=True)
        stages = tuple(chunk.stage for chunk in path)
        return _Ranges(stages, forward, inputs, weights, (*sends, 0.0))

    def _message(self, plan: Plan, sender: Stage, receiver: Stage) -> float:
        """Return the least seconds of a micro-batch's way from a stage to another."""
        if sender is receiver or self._free_messages:
            return 0.0
        sides = (sender, receiver)
        key = tuple((PlacedStage.of(side), sequences_of(side)) for side in sides)
        known = self._known.messages
        if key not in known:
            pools = [pool for side in sides for pool in side.chips.pools]
            efficiencies = [self._prices[pool].efficiency for pool in pools]
            nodes = [self._cluster.pool(pool).node for pool in pools]
            known[key] = boundary_price(
                Boundary(sender, receiver, plan.job.sequence_length),
                self._cluster,
                self._model.hidden * plan.job.precision.stream.num_bytes,
                min(efficiencies, key=lambda efficiency: efficiency.fabric),
                host_bandwidth=min(
                    node.host.memory_bandwidth * node.hosts / node.num_chips for node in nodes
                ),
            ).seconds
        return known[key]

    def _passes(
        self, plan: Plan, pipeline: Pipeline, stage: Stage, replica: Replica
    ) -> _Passes | None:
        once = pipeline.micro_batches == 1
        key = (stage.units, replica, stage.experts and stage, plan.job.wide_units, once)
        known = self._known.passes
        if key not in known:
            try:
                known[key] = self._added_up(plan, stage, replica, once=once)
            except InputError:  # layers that were not measured so
                known[key] = None
        return known[key]

    def _added_up(self, plan: Plan, stage: Stage, replica: Replica, *, once: bool) -> _Passes:
        pool = replica.chips.pools[0]
        prices, node = self._prices[pool], self._cluster.pool(pool).node
        work = workload_of(plan, stage, replica, self._kernels)
        placement = placement_of(replica, node)

        def times_of(unit: int) -> UnitTimes:
            again: Recompute = "selective" if covers(replica.recompute.selective, unit) else "none"
            return prices.unit(
                work,
                unit,
                "full" if covers(replica.recompute.full, unit) else again,
                overlap_chunks=replica.tp_overlap_chunks,
                context_kind=replica.context_kind,
                placement=placement,
                wide=not plan.job.narrow(unit),
                made_once=once,
            )

        ranges = [[times_of(unit) for unit in range(*span)] for span in sorted(stage.units)]
        return _Passes(
            tuple(sum(times.forward for times in span) for span in ranges),
            tuple(sum(times.backward_input for times in span) for span in ranges),
            tuple(sum(times.backward_weight for times in span) for span in ranges),
            sum(sum(times) for span in ranges for times in span),
        )


def _until_last_input(own: _Passes, pipeline: Pipeline, *, delays: bool) -> float:
    """Return what a rank computes until its last input pass has ended.

    Where weight passes are put off that may be none of them; else all but the last one.
    """
    count = pipeline.micro_batches
    later = count * sum(own.backward_weight) if delays else max(own.backward_weight)
    return count * own.whole - later
