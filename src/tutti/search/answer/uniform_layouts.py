"""Uniform layouts: which degrees go on which chips, with what the tables say they take."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tutti.hardware.pool import Pool
from tutti.plan.job import ScheduleKind
from tutti.plan.uniform import Degrees, even_cuts
from tutti.search.pricing.unit_tables import KINDS, NONE, Config, FloatArray, Tables
from tutti.search.thresholds import THRESHOLDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One uniform strategy, priced by the tables."""

    degrees: Degrees
    schedule: ScheduleKind
    seconds: float
    stages: tuple[tuple[str, ...], ...]  # pools of each stage
    chips: tuple[tuple[str, int], ...]  # of each pool, that may take part

    @property
    def kind(self) -> object:
        """What candidates have in common whose prices err alike."""
        pools = tuple(name for name, _ in self.chips)
        return (self.schedule, self.degrees.shard, self.degrees.recompute, pools)

    def passes(self, tables: Tables) -> int:
        """Return how many passes its chips run in a step: what a simulation costs."""
        problem, degrees = tables.problem, self.degrees
        rounds = problem.job.global_batch * degrees.pp // degrees.micro_batch
        return 2 * rounds * degrees.tp * degrees.cp * degrees.vpp


def full_layouts(tables: Tables) -> Iterator[Layout]:
    """Yield the degrees that use every chip."""
    problem = tables.problem
    chips = problem.num_chips
    everything = {pool.name: pool.num_chips for pool in problem.pools}
    degrees = [set(problem.tensor_degrees(pool)) for pool in problem.pools]
    for tp in sorted(set.intersection(*degrees)):
        for cp, ep in itertools.product(problem.context_degrees(), problem.expert_degrees()):
            for pp in range(1, min(problem.model.num_layers, chips // (tp * cp)) + 1):
                if chips % (tp * cp * pp) == 0:
                    given = Degrees(tp=tp, cp=cp, ep=ep, pp=pp, dp=chips // (tp * cp * pp))
                    for sequences in problem.sequence_counts():
                        yield from _layout(
                            tables, replace(given, micro_batch=sequences), everything
                        )


def partial_layouts(tables: Tables, below: float) -> Iterator[Layout]:
    """Yield degrees that leave chips idle, where what the others compute may take less than that.

    Pools without a tensor degree are left out with it; so may be any one, or all but one. Of the
    rest each has as many chips as whole replicas take, and as many replicas work as share the
    batch out evenly.
    """
    problem = tables.problem
    degrees = {pool.name: problem.tensor_degrees(pool) for pool in problem.pools}
    for tp in sorted(set().union(*degrees.values())):
        able = [pool for pool in problem.pools if tp in degrees[pool.name]]
        for cp, ep, sequences in itertools.product(
            problem.context_degrees(), problem.expert_degrees(), problem.sequence_counts()
        ):
            given = Degrees(tp=tp, cp=cp, ep=ep, micro_batch=sequences)
            for chips in _uses(able, tp * cp):
                yield from _fewer(tables, given, chips, below)


def shared_layouts(tables: Tables, layouts: Iterable[Layout]) -> Iterator[Layout]:
    """Yield those of one stage again, with all states shared out over its replicas (level 3)."""
    for layout in layouts:
        degrees = layout.degrees
        if degrees.pp == 1 and degrees.shard == 1 and 3 in tables.problem.space.shard:
            yield replace(layout, degrees=replace(degrees, shard=3))


def _uses(pools: Sequence[Pool], width: int) -> Iterator[dict[str, int]]:
    """Yield how many chips of each pool may take part: of all, of all but one, of one."""
    whole = {pool.name: pool.num_chips // width * width for pool in pools}
    whole = {name: count for name, count in whole.items() if count}
    names = list(whole)
    sets = [names, *([n for n in names if n != out] for out in names), *([n] for n in names)]
    for chosen in dict.fromkeys(map(tuple, sets)):
        if chosen:
            yield {name: whole[name] for name in chosen}


def _fewer(
    tables: Tables, given: Degrees, chips: Mapping[str, int], below: float
) -> Iterator[Layout]:
    """Yield the depths at which so many chips of each pool may be faster than `below`."""
    problem, width = tables.problem, given.tp * given.cp
    rounds = problem.job.global_batch / given.micro_batch  # of one replica
    slowest = _slowest(tables, given, chips)
    held = sum(chips.values()) // width
    if slowest is None or THRESHOLDS.uniform_sure * rounds * slowest / held >= below:
        return
    for pp in range(1, min(problem.model.num_layers, held) + 1):
        dp = _even_share(problem.job.global_batch, given.micro_batch, held // pp)
        every = dp * pp * width == problem.num_chips
        if dp and not every and THRESHOLDS.uniform_sure * rounds * slowest / (dp * pp) < below:
            yield from _layout(tables, replace(given, pp=pp, dp=dp), chips)


def _slowest(tables: Tables, given: Degrees, chips: Mapping[str, int]) -> float | None:
    """Return the seconds of a micro-batch on the slowest of some pools; None: not measured."""
    slowest = 0.0
    for pool in chips:
        config = Config(pool, given.tp, given.cp, given.ep, given.micro_batch)
        if tables.get(config) is None:
            return None
        slowest = max(slowest, float(tables.sums(config)[NONE][:, -1].sum()))
    return slowest


def _even_share(batch: int, sequences: int, most: int) -> int:
    """Return the largest number of replicas that share the batch out evenly; 0: there is none."""
    if batch % sequences:
        return 0
    whole = batch // sequences
    return next((dp for dp in range(min(most, whole), 0, -1) if whole % dp == 0), 0)


def _layout(tables: Tables, given: Degrees, chips: Mapping[str, int]) -> Iterator[Layout]:
    problem = tables.problem
    dp = given.dp or 1
    if given.ep > 1 and (dp * given.tp * given.cp) % given.ep:
        return
    if problem.job.global_batch % (dp * given.micro_batch):
        return
    stages = _stage_pools(chips, given.tp * given.cp, dp, given.pp)
    if stages is None:
        return
    for pool in dict.fromkeys(pool for pools in stages for pool in pools):
        if tables.get(Config(pool, given.tp, given.cp, given.ep, given.micro_batch)) is None:
            return
    # The optimizer's states are sharded where there is somebody to share them with.
    degrees = replace(
        given,
        shard=int(dp * given.cp > 1),
        sequence_parallel=Config("", given.tp, given.cp).splits_tokens(problem.job.sequence_length),
        recompute=next(kind for kind in KINDS if kind in problem.space.recompute),
    )
    for virtual in (1, 2, 4):
        priced = price(tables, replace(degrees, vpp=virtual), stages, tuple(chips.items()))
        if priced is not None:
            yield priced


def _stage_pools(
    chips: Mapping[str, int], width: int, dp: int, pp: int
) -> tuple[tuple[str, ...], ...] | None:
    """Return the pools of each stage's replicas; None where a replica would lie across two."""
    if any(count % width for count in chips.values()):
        return None
    bounds = [0, *itertools.accumulate(chips.values())]
    spans = list(zip(chips, itertools.pairwise(bounds), strict=True))
    return tuple(
        tuple(name for name, (a, b) in spans if a < (s + 1) * dp * width and s * dp * width < b)
        for s in range(pp)
    )


def price(
    tables: Tables,
    degrees: Degrees,
    stages: tuple[tuple[str, ...], ...],
    chips: tuple[tuple[str, int], ...],
) -> Layout | None:
    """Return a layout with its price; None where the model has too few layers for it."""
    problem, pp, virtual = tables.problem, degrees.pp, degrees.vpp
    kind = ScheduleKind.ONE_F_ONE_B if virtual == 1 else ScheduleKind.INTERLEAVED
    if virtual > 1 and (pp == 1 or kind not in problem.space.schedules):
        return None
    if pp * virtual > problem.model.num_layers:
        return None
    cuts = even_cuts(problem.model.num_layers, pp * virtual)
    dp = degrees.dp or 1
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
    return Layout(
        degrees=degrees,
        schedule=kind,
        seconds=float(rounds * slowest.max() + filled.sum() - filled.max()),
        stages=stages,
        chips=chips,
    )


def _passes(sums: FloatArray, recompute: int) -> FloatArray:
    """Return the seconds of all units before each; embedding and head are never recomputed."""
    passes: FloatArray = sums[recompute].copy()
    if recompute == NONE:
        return passes
    passes[:, 1:] += (sums[NONE] - sums[recompute])[:, 1:2]
    passes[:, -1:] += np.diff(sums[NONE][:, -2:]) - np.diff(sums[recompute][:, -2:])
    return passes
