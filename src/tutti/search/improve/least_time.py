"""Seconds that a plan's passes take by themselves: no order of them, and no network, is faster.

A class of ranks computes all its passes one after the other, and the first of them begins when a
micro-batch has gone forward through all stages before. What a step is predicted to take is never
less, so a plan for which this is too much already need not be simulated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tutti.cost.kernels import Kernels
from tutti.cost.memory.rank_state import workload_of
from tutti.cost.network.group_placement import placement_of
from tutti.cost.plan.pool_prices import PoolPrices
from tutti.errors import InputError
from tutti.hardware.cluster import Cluster
from tutti.models.memory import Recompute
from tutti.models.spec import ModelSpec
from tutti.plan.plan import Pipeline, Plan, Replica, Stage, chunks, covers


class _Passes(NamedTuple):
    """Seconds of a micro-batch on a rank: forward through its first units, and all passes."""

    first_forward: float
    whole: float


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
        self._known: dict[object, _Passes | None] = {}

    def seconds(self, plan: Plan) -> float:
        """Return what a step takes at the least on a typical node; 0 where passes are unknown."""
        return max(self._pipeline(plan, pipeline) for pipeline in plan.pipelines)

    def _pipeline(self, plan: Plan, pipeline: Pipeline) -> float:
        longest = lead = 0.0
        begun = set()
        for chunk in chunks(pipeline):
            if chunk.stage in begun:
                break
            begun.add(chunk.stage)
            stage = pipeline.stages[chunk.stage]
            passes = [self._passes(plan, pipeline, stage, replica) for replica in stage.replicas]
            if any(each is None for each in passes):
                return 0.0
            known = [each for each in passes if each is not None]
            most = max(each.whole for each in known)
            longest = max(longest, lead + pipeline.micro_batches * most)
            lead += min(each.first_forward for each in known)
        return longest

    def _passes(
        self, plan: Plan, pipeline: Pipeline, stage: Stage, replica: Replica
    ) -> _Passes | None:
        once = pipeline.micro_batches == 1
        key = (stage.units, replica, stage.experts and stage, plan.job.wide_units, once)
        if key not in self._known:
            try:
                self._known[key] = self._added_up(plan, stage, replica, once=once)
            except InputError:  # layers that were not measured so
                self._known[key] = None
        return self._known[key]

    def _added_up(self, plan: Plan, stage: Stage, replica: Replica, *, once: bool) -> _Passes:
        pool = replica.chips.pools[0]
        prices, node = self._prices[pool], self._cluster.pool(pool).node
        work = workload_of(plan, stage, replica, self._kernels)
        placement = placement_of(replica, node)
        first, whole = 0.0, 0.0
        for number, (start, stop) in enumerate(stage.units):
            for unit in range(start, stop):
                again: Recompute = (
                    "selective" if covers(replica.recompute.selective, unit) else "none"
                )
                times = prices.unit(
                    work,
                    unit,
                    "full" if covers(replica.recompute.full, unit) else again,
                    overlap_chunks=replica.tp_overlap_chunks,
                    context_kind=replica.context_kind,
                    placement=placement,
                    wide=not plan.job.narrow(unit),
                    made_once=once,
                )
                whole += sum(times)
                first += times.forward if number == 0 else 0.0
        return _Passes(first, whole)
