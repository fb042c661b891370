"""The best uniform (Megatron-style) plan: the same degrees everywhere, layers cut evenly.

What people run today on a mixed cluster, and therefore what every searched plan is held against.
All degrees are priced by the same tables as the search, the best few are simulated.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np

from tutti.errors import InputError
from tutti.plan.plan import Plan
from tutti.plan.schedules import StagePlace, schedule_record
from tutti.plan.uniform import Degrees, even_cuts, uniform_plan
from tutti.search.answer.uniform_layouts import (
    Layout,
    full_layouts,
    partial_layouts,
    price,
    shared_layouts,
)
from tutti.search.cutting.memory_relief import Slot, made_bytes, static_bytes
from tutti.search.cutting.relief_mixture import GATHERED
from tutti.search.pricing.memory_budget import usable_bytes
from tutti.search.pricing.simulate_draft import DraftSimulator
from tutti.search.pricing.unit_tables import KINDS, NONE, Config, ConfigTable, Tables
from tutti.search.thresholds import THRESHOLDS
from tutti.simulate.estimate import Estimate


def best_uniform(
    tables: Tables,
    simulator: DraftSimulator,
    wanted: Callable[[Plan], bool] | None = None,
    *,
    idle: bool = True,
) -> tuple[Plan, Estimate] | str:
    """Return the best uniform plan that fits (and is `wanted`), or why there is none.

    First those that use every chip; then those that leave pools or single chips idle, as far as
    they may be faster; on all but large clusters also those without pipelines whose replicas share
    all states.
    """
    search = _Simulated(tables, simulator, wanted)
    search.run(full_layouts(tables))
    partial = list(partial_layouts(tables, search.reached)) if idle else []
    search.run(partial)
    if tables.problem.num_chips < THRESHOLDS.uniform_large:
        search.run(shared_layouts(tables, (*full_layouts(tables), *partial)))
    if search.best is not None:
        return search.best
    if not search.seen:
        return "no uniform degrees divide the chips and the batch"
    return "no uniform degrees fit into memory"


class _Simulated:
    """Simulates the best few candidates; remembers what was learnt about prices."""

    def __init__(
        self, tables: Tables, simulator: DraftSimulator, wanted: Callable[[Plan], bool] | None
    ) -> None:
        self.tables, self.simulator, self.wanted = tables, simulator, wanted
        self.best: tuple[Plan, Estimate] | None = None
        self.seen = 0
        self._passes = 0
        self._known: dict[object, float] = {}  # by kind: what simulation added to the price

    @property
    def reached(self) -> float:
        """Seconds of the best so far."""
        return math.inf if self.best is None else self.best[1].step_seconds

    def run(self, candidates: Iterable[Layout]) -> None:
        """Simulate candidates in the order of their prices, until none promises more."""
        queue = [_queued(candidate) for candidate in candidates]
        self.seen += len(queue)
        heapq.heapify(queue)
        tried, self._passes = 0, 0
        while queue and tried < 5 * THRESHOLDS.uniform_simulated:
            *_, candidate = heapq.heappop(queue)
            worth = self._is_worth_it(candidate, tried)
            if worth is None:
                break
            if not worth:
                continue
            if not _fits_everywhere(self.tables, candidate):
                for other in _relieved(self.tables, candidate):
                    heapq.heappush(queue, _queued(other))
                continue
            tried += self._simulate(candidate)

    def _is_worth_it(self, candidate: Layout, tried: int) -> bool | None:
        """Tell whether a candidate may be the best; None where none behind it is."""
        if self.best is None:
            return True
        reached, known = self.best[1].step_seconds, candidate.kind in self._known
        if candidate.seconds > 1.05 * reached:
            return None
        if known and candidate.seconds + self._known[candidate.kind] >= reached:
            return False
        if known or tried >= THRESHOLDS.uniform_simulated:
            self._passes += candidate.passes(self.tables)
            if self._passes > THRESHOLDS.uniform_passes:
                return None
        return True

    def _simulate(self, candidate: Layout) -> bool:
        """Price a candidate; return whether that took a simulation."""
        plan = _plan(self.tables, candidate)
        if plan is None or (self.wanted is not None and not self.wanted(plan)):
            return False
        estimate = self.simulator.price(plan)
        if estimate.fits or self.tables.problem.unlimited_memory:
            added = estimate.step_seconds - candidate.seconds
            self._known[candidate.kind] = min(added, self._known.get(candidate.kind, added))
            if self.best is None or estimate.step_seconds < self.best[1].step_seconds:
                self.best = (plan, estimate)
        return True


def _queued(layout: Layout) -> tuple[float, str, Layout]:
    """Return a layout with what it is sorted by; no two are alike in that."""
    return layout.seconds, f"{layout.degrees} {layout.chips}", layout


def _relieved(tables: Tables, candidate: Layout) -> Iterator[Layout]:
    """Yield the same degrees with more recomputation: what did not fit may fit then."""
    degrees = candidate.degrees
    for kind in KINDS[KINDS.index(degrees.recompute) + 1 :]:
        if kind in tables.problem.space.recompute:
            changed = replace(degrees, recompute=kind)
            priced = price(tables, changed, candidate.stages, candidate.chips)
            if priced is not None:
                yield priced
            return


def _plan(tables: Tables, candidate: Layout) -> Plan | None:
    problem = tables.problem
    job = replace(problem.job, schedule=candidate.schedule)
    try:
        plan = uniform_plan(
            problem.model, problem.cluster, job, candidate.degrees, dict(candidate.chips)
        )
    except InputError:
        return None
    return _overlapped(tables, replace(plan, cluster=tables.references[1]), candidate.degrees)


def _overlapped(tables: Tables, plan: Plan, degrees: Degrees) -> Plan:
    """Cut tensor-parallel collectives as the searched plans do; Megatron can, too."""
    if degrees.tp == 1:
        return plan

    def chunks(pool: str) -> int:
        table = tables.get(Config(pool, degrees.tp, degrees.cp, degrees.ep, degrees.micro_batch))
        return table.overlap_chunks if table is not None else 1

    pipelines = tuple(
        replace(
            pipeline,
            stages=tuple(
                replace(
                    stage,
                    replicas=tuple(
                        replace(r, tp_overlap_chunks=chunks(r.chips.pools[0]))
                        for r in stage.replicas
                    ),
                )
                for stage in pipeline.stages
            ),
        )
        for pipeline in plan.pipelines
    )
    return replace(plan, pipelines=pipelines)


def _fits_everywhere(tables: Tables, candidate: Layout) -> bool:
    """Tell whether every pool of every stage has the memory, as far as counting can tell."""
    problem, degrees = tables.problem, candidate.degrees
    pp, virtual = degrees.pp, degrees.vpp
    dp = degrees.dp or 1
    rounds = problem.job.global_batch // (dp * degrees.micro_batch)
    cuts = even_cuts(problem.model.num_layers, pp * virtual)
    recompute = KINDS.index(degrees.recompute)
    record = schedule_record(candidate.schedule)
    for s, pools in enumerate(candidate.stages):
        own = np.concatenate([np.arange(a, b) for a, b in cuts[s::pp]])
        flight = record.in_flight(StagePlace(pp, s, rounds, virtual))
        for pool in pools:
            config = Config(pool, degrees.tp, degrees.cp, degrees.ep, degrees.micro_batch)
            table = tables.get(config)
            if table is None or not _fits(tables, table, own, degrees, recompute, flight, dp):
                return False
    return True


def _fits(
    tables: Tables,
    table: ConfigTable,
    own: np.ndarray[tuple[int], np.dtype[np.int64]],
    degrees: Degrees,
    recompute: int,
    flight: float,
    dp: int,
) -> bool:
    problem = tables.problem
    if problem.unlimited_memory:
        return True
    config = table.config
    slot = Slot(
        table=table,
        in_flight=flight,
        sharers=dp * degrees.cp,
        expert_sharers=max(1.0, dp * config.width / config.ep),
        shard=degrees.shard,
        micro_batches=problem.job.global_batch // (dp * degrees.micro_batch),
    )
    blocks = (own > 0) & (own < problem.model.head_unit)
    kept = np.where(blocks, table.kept[recompute, own], table.kept[NONE, own])
    again = np.where(blocks, table.kept[NONE, own] - table.kept[recompute, own], 0.0)
    moving = np.maximum(flight * kept, made_bytes(slot)[own])
    held = float((static_bytes(slot)[own] + moving).sum())
    passing = float((table.passing[own] + again).max()) + THRESHOLDS.boundaries * table.boundary
    if degrees.shard >= 3:
        passing += GATHERED * float(table.parameter_bytes[own].max())
    limit = tables.pool(config.pool).chip.memory_bytes
    return held + passing <= 1.02 * usable_bytes(limit, tables.sources.overheads)
