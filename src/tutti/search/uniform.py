"""The best uniform (Megatron-style) plan: the same degrees everywhere, layers cut evenly.

What people run today on a mixed cluster, and therefore what every searched plan is held against.
All degrees are priced by the same tables as the search, the best few are simulated.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from tutti.errors import InputError
from tutti.plan.chips import ChipSet
from tutti.plan.job import ScheduleKind
from tutti.plan.plan import Plan
from tutti.plan.uniform import Degrees, even_cuts, uniform_plan
from tutti.search.build import in_flight
from tutti.search.mixtures import GATHERED
from tutti.search.remedies import BOUNDARIES, Slot, made_bytes, static_bytes
from tutti.search.room import usable_bytes
from tutti.search.settle import Settler
from tutti.search.tables import KINDS, NONE, Config, ConfigTable, FloatArray, Tables
from tutti.simulate.estimate import Estimate

SIMULATED = 2  # kinds, of each the best
MORE_PASSES = 40_000  # of all chips, in further simulations: a large cluster has none


@dataclass(frozen=True, slots=True, kw_only=True)
class _Priced:
    degrees: Degrees
    schedule: ScheduleKind
    seconds: float
    stages: tuple[tuple[str, ...], ...]  # pools of each stage

    @property
    def kind(self) -> object:
        """What candidates have in common whose prices err alike."""
        return (self.schedule, self.degrees.shard, self.degrees.recompute)

    def passes(self, tables: Tables) -> int:
        """Return how many passes its chips run in a step: what a simulation costs."""
        problem, degrees = tables.problem, self.degrees
        rounds = problem.job.global_batch * degrees.pp // degrees.micro_batch
        return 2 * rounds * degrees.tp * degrees.cp * degrees.vpp


def best_uniform(tables: Tables, settler: Settler) -> tuple[Plan, Estimate] | str:
    """Return the best uniform plan that fits, or why there is none."""
    queue = [(c.seconds, str(c.degrees), c) for c in _candidates(tables)]
    if not queue:
        return "no uniform degrees divide the chips and the batch"
    heapq.heapify(queue)
    best: tuple[Plan, Estimate] | None = None
    tried, passes = 0, 0
    known: dict[object, float] = {}  # kinds of which the best was simulated, and how much is added
    while queue and tried < 5 * SIMULATED:
        seconds, _, candidate = heapq.heappop(queue)
        if best is not None:
            expected = seconds + known.get(candidate.kind, 0.0)
            if seconds > 1.05 * best[1].step_seconds:
                break
            if expected >= best[1].step_seconds and candidate.kind in known:
                continue
            if candidate.kind in known or tried >= SIMULATED:
                passes += candidate.passes(tables)
                if passes > MORE_PASSES:
                    break
        if not _fits_everywhere(tables, candidate):
            for other in _relieved(tables, candidate):
                heapq.heappush(queue, (other.seconds, str(other.degrees), other))
            continue
        tried += 1
        plan = _plan(tables, candidate)
        if plan is None:
            continue
        found = settler.price(plan)
        if not (found.fits or tables.problem.unlimited_memory):
            continue
        added = found.step_seconds - candidate.seconds
        known[candidate.kind] = min(added, known.get(candidate.kind, added))
        if best is None or found.step_seconds < best[1].step_seconds:
            best = (plan, found)
    return best or "no uniform degrees fit into memory"


def _relieved(tables: Tables, candidate: _Priced) -> Iterator[_Priced]:
    """Yield the same degrees with more recomputation: what did not fit may fit then."""
    degrees = candidate.degrees
    position = KINDS.index(degrees.recompute)
    for kind in KINDS[position + 1 :]:
        if kind in tables.problem.space.recompute:
            changed = replace(degrees, recompute=kind)
            priced = _price(tables, changed, [list(pools) for pools in candidate.stages])
            if priced is not None:
                yield priced
            return


def _plan(tables: Tables, candidate: _Priced) -> Plan | None:
    problem = tables.problem
    job = replace(problem.job, schedule=candidate.schedule)
    try:
        plan = uniform_plan(problem.model, problem.used_cluster(), job, candidate.degrees)
    except InputError:
        return None
    if problem.space.pools is not None:
        others = [pool for pool in problem.cluster.pools if pool not in problem.pools]
        idle = [
            ChipSet.of(f"{pool.name}/0-{pool.nodes - 1}/0-{pool.node.num_chips - 1}")
            for pool in others
        ]
        left = ChipSet.join([plan.idle, *idle])
        plan = replace(plan, cluster=tables.references[1], idle=left)
    return _overlapped(tables, plan, candidate.degrees)


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


def _candidates(tables: Tables) -> Iterator[_Priced]:
    problem = tables.problem
    chips = sum(pool.num_chips for pool in problem.pools)
    degrees = [set(problem.tensor_degrees(pool)) for pool in problem.pools]
    for tp in sorted(set.intersection(*degrees)):
        for cp, ep in itertools.product(problem.context_degrees(), problem.expert_degrees()):
            for pp in range(1, min(problem.model.num_layers, chips // (tp * cp)) + 1):
                if chips % (tp * cp * pp) == 0:
                    yield from _layout(tables, tp, cp, ep, pp)


def _layout(tables: Tables, tp: int, cp: int, ep: int, pp: int) -> Iterator[_Priced]:
    problem = tables.problem
    dp = problem.num_chips // (tp * cp * pp)
    if ep > 1 and (dp * tp * cp) % ep:
        return
    stages = _stage_pools(tables, tp * cp, dp, pp)
    if stages is None:
        return
    batch = problem.job.global_batch
    for sequences in problem.sequence_counts():
        if batch % (dp * sequences):
            continue
        table = {
            pool: tables.get(Config(pool, tp, cp, ep, sequences))
            for pools in stages
            for pool in pools
        }
        if any(found is None for found in table.values()):
            continue
        # The optimizer's states are sharded where there is somebody to share them with.
        degrees = Degrees(
            tp=tp, pp=pp, cp=cp, ep=ep, micro_batch=sequences, shard=int(dp * cp > 1),
            sequence_parallel=Config("", tp, cp).splits_tokens(problem.job.sequence_length),
            recompute=next(kind for kind in KINDS if kind in problem.space.recompute),
        )  # fmt: skip
        for virtual in (1, 2, 4):
            priced = _price(tables, replace(degrees, vpp=virtual), stages)
            if priced is not None:
                yield priced


def _stage_pools(tables: Tables, width: int, dp: int, pp: int) -> list[list[str]] | None:
    """Return the pools of each stage's replicas; None where a replica would lie across two."""
    bounds = [0]
    for pool in tables.problem.pools:
        bounds.append(bounds[-1] + pool.num_chips)
        if bounds[-1] % width:
            return None
    names = [pool.name for pool in tables.problem.pools]
    found = []
    for s in range(pp):
        start, stop = s * dp * width, (s + 1) * dp * width
        found.append(
            [n for n, (a, b) in zip(names, itertools.pairwise(bounds), strict=True)
             if a < stop and start < b]
        )  # fmt: skip
    return found


def _price(tables: Tables, degrees: Degrees, stages: list[list[str]]) -> _Priced | None:
    problem, pp, virtual = tables.problem, degrees.pp, degrees.vpp
    kind = ScheduleKind.ONE_F_ONE_B if virtual == 1 else ScheduleKind.INTERLEAVED
    if virtual > 1 and (pp == 1 or kind not in problem.space.schedules):
        return None
    if pp * virtual > problem.model.num_layers:
        return None
    cuts = even_cuts(problem.model.num_layers, pp * virtual)
    dp = problem.num_chips // (degrees.tp * degrees.cp * pp)
    rounds = problem.job.global_batch // (dp * degrees.micro_batch)
    recompute = KINDS.index(degrees.recompute)
    bounds = np.array([[a for a, _ in cuts], [b for _, b in cuts]])
    slowest, filled = np.zeros(pp), np.zeros(pp)
    for pool in dict.fromkeys(pool for pools in stages for pool in pools):
        config = Config(pool, degrees.tp, degrees.cp, degrees.ep, degrees.micro_batch)
        passes = _passes(tables.sums(config), recompute)
        by_range = passes[:, bounds[1]] - passes[:, bounds[0]]
        by_stage = by_range.reshape(len(passes), virtual, pp).sum(axis=1)
        here = np.array([pool in pools for pools in stages])
        slowest = np.maximum(slowest, np.where(here, by_stage.sum(axis=0), 0.0))
        filled = np.maximum(filled, np.where(here, by_stage[:2].sum(axis=0) / virtual, 0.0))
    return _Priced(
        degrees=degrees,
        schedule=kind,
        seconds=float(rounds * slowest.max() + filled.sum() - filled.max()),
        stages=tuple(tuple(pools) for pools in stages),
    )


def _passes(sums: FloatArray, recompute: int) -> FloatArray:
    """Return the seconds of all units before each; embedding and head are never recomputed."""
    passes: FloatArray = sums[recompute].copy()
    if recompute == NONE:
        return passes
    passes[:, 1:] += (sums[NONE] - sums[recompute])[:, 1:2]
    passes[:, -1:] += np.diff(sums[NONE][:, -2:]) - np.diff(sums[recompute][:, -2:])
    return passes


def _fits_everywhere(tables: Tables, candidate: _Priced) -> bool:
    """Tell whether every pool of every stage has the memory, as far as counting can tell."""
    problem, degrees = tables.problem, candidate.degrees
    pp, virtual = degrees.pp, degrees.vpp
    dp = problem.num_chips // (degrees.tp * degrees.cp * pp)
    rounds = problem.job.global_batch // (dp * degrees.micro_batch)
    cuts = even_cuts(problem.model.num_layers, pp * virtual)
    recompute = KINDS.index(degrees.recompute)
    for s, pools in enumerate(candidate.stages):
        own = np.concatenate([np.arange(a, b) for a, b in cuts[s::pp]])
        flight = in_flight(candidate.schedule, virtual, pp, s, rounds)
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
    passing = float((table.passing[own] + again).max()) + BOUNDARIES * table.boundary
    if degrees.shard >= 3:
        passing += GATHERED * float(table.parameter_bytes[own].max())
    limit = tables.pool(config.pool).chip.memory_bytes
    return held + passing <= 1.02 * usable_bytes(limit, tables.sources.overheads)
