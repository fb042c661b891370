"""Every skeleton of a small space: who forms which stages, micro-batches, schedule, shard level.

A skeleton is a strategy without its cuts; `cuts` yields those. What the space allows is decided
here; what is worth a price, and which plan is the best, is the business of `exact`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from tutti.plan.job import ScheduleKind
from tutti.plan.plan import UnitRanges
from tutti.plan.schedules import schedule_record
from tutti.plan.uniform import even_cuts
from tutti.search.pricing.unit_tables import Config, Tables
from tutti.search.question.space import Problem

_T = TypeVar("_T")
Chips = tuple[int, ...]  # of each pool of the problem


class Group(NamedTuple):
    """Equal replicas of a stage."""

    config: Config
    copies: int


Stages = tuple[tuple[Group, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Skeleton:
    """A strategy without its cuts: stages of each pipeline, their counts, schedule, shards."""

    pipelines: tuple[tuple[Stages, int], ...]  # stages, micro-batches
    schedule: ScheduleKind
    virtual: tuple[int, ...]  # unit ranges per stage, of each pipeline
    shard: int


class TooLargeError(Exception):
    """The space is larger than the caller wants it enumerated."""


def limited(items: Iterable[_T], most: float) -> Iterator[_T]:
    """Yield items until there are too many."""
    for number, item in enumerate(items):
        if number >= most:
            raise TooLargeError
        yield item


def cuts(problem: Problem, num_stages: int, virtual: int) -> Iterator[tuple[UnitRanges, ...]]:
    """Yield the unit ranges of every stage, for every cut of the space."""
    units, layers = problem.model.num_units, problem.model.num_layers
    chunks = num_stages * virtual
    if not problem.space.uneven_units:
        all_cuts = [even_cuts(layers, chunks)] if chunks <= layers else []
    else:
        all_cuts = [
            list(itertools.pairwise((0, *inner, units)))
            for inner in itertools.combinations(range(1, units), chunks - 1)
        ]
    for ranges in all_cuts:
        yield tuple(tuple(ranges[s::num_stages]) for s in range(num_stages))


def skeletons(problem: Problem, tables: Tables, most: float = math.inf) -> Iterator[Skeleton]:
    """Yield every skeleton of one or two pipelines; give up where a micro-batch has too many."""
    pools = [pool.name for pool in problem.pools]
    chips = tuple(pool.num_chips for pool in problem.pools)
    batch, space = problem.job.global_batch, problem.space
    one: dict[int, list[tuple[Stages, Chips]]] = {
        size: list(limited(_pipelines(problem, tables, pools, chips, size), most))
        for size in range(1, batch + 1)
    }
    for size, options in one.items():
        if batch % size == 0:
            for stages, used in options:
                if space.idle or used == chips:
                    yield from _scheduled(problem, ((stages, batch // size),))
    if space.max_pipelines == 1:
        return
    for first, second in itertools.product(sorted(one), repeat=2):  # the first gets its chips first
        for counts in _splits(batch, first, second):
            for (a, used_a), (b, used_b) in itertools.product(one[first], one[second]):
                total = tuple(x + y for x, y in zip(used_a, used_b, strict=True))
                if any(t > n for t, n in zip(total, chips, strict=True)):
                    continue
                if space.idle or total == chips:
                    yield from _scheduled(problem, ((a, counts[0]), (b, counts[1])))


def _splits(batch: int, first: int, second: int) -> Iterator[tuple[int, int]]:
    for count in range(1, batch // first + 1):
        rest = batch - count * first
        if rest > 0 and rest % second == 0:
            yield count, rest // second


def _scheduled(problem: Problem, pipelines: tuple[tuple[Stages, int], ...]) -> Iterator[Skeleton]:
    space = problem.space
    single = all(len(stages) == 1 for stages, _ in pipelines)
    kinds: list[tuple[ScheduleKind, tuple[int, ...]]] = []
    for kind in space.schedules:
        if schedule_record(kind).several_ranges:
            if all(len(stages) > 1 for stages, _ in pipelines):
                several = [v for v in space.virtual if v > 1]
                kinds += [(kind, vs) for vs in itertools.product(several, repeat=len(pipelines))]
        elif not single or not kinds:
            kinds.append((kind, (1,) * len(pipelines)))
    for (kind, virtual), shard in itertools.product(kinds, space.shard):
        yield Skeleton(pipelines=pipelines, schedule=kind, virtual=virtual, shard=shard)


def _pipelines(
    problem: Problem, tables: Tables, pools: list[str], chips: Chips, size: int
) -> Iterator[tuple[Stages, Chips]]:
    """Yield every sequence of stages whose micro-batch is `size` sequences."""
    options = list(_stage_options(problem, tables, pools, chips, size))
    space = problem.space
    most = min(space.max_stages or problem.model.num_units, problem.model.num_units)

    def extend(stages: Stages, used: Chips) -> Iterator[tuple[Stages, Chips]]:
        if stages:
            yield stages, used
        if len(stages) == most:
            return
        for groups, more in options:
            if stages and not space.mixed_pipelines and _pools(groups) != _pools(stages[0]):
                continue
            total = tuple(x + y for x, y in zip(used, more, strict=True))
            if all(t <= n for t, n in zip(total, chips, strict=True)):
                yield from extend((*stages, groups), total)

    yield from extend((), (0,) * len(pools))


def _pools(groups: tuple[Group, ...]) -> tuple[str, ...]:
    return tuple(group.config.pool for group in groups)


def _stage_options(
    problem: Problem, tables: Tables, pools: list[str], chips: Chips, size: int
) -> Iterator[tuple[tuple[Group, ...], Chips]]:
    """Yield every set of replica groups that together take `size` sequences."""
    space = problem.space
    for ep in problem.expert_degrees():
        alone: list[list[Group]] = [
            _groups(problem, tables, index, ep, size) for index in range(len(pools))
        ]
        for index, options in enumerate(alone):
            for group in options:
                if group.copies * group.config.sequences == size:
                    yield from _checked((group,), (index,), ep, chips)
        if not space.mixed_stages:
            continue
        for a, b in itertools.combinations(range(len(pools)), 2):
            for one, other in itertools.product(alone[a], alone[b]):
                taken = one.copies * one.config.sequences + other.copies * other.config.sequences
                if taken != size:
                    continue
                if not space.uneven_shares and one.config.sequences != other.config.sequences:
                    continue
                yield from _checked((one, other), (a, b), ep, chips)


def _checked(
    groups: tuple[Group, ...], where: tuple[int, ...], ep: int, chips: Chips
) -> Iterator[tuple[tuple[Group, ...], Chips]]:
    used = [0] * len(chips)
    for group, index in zip(groups, where, strict=True):
        used[index] += group.copies * group.config.width
    if sum(used) % ep == 0:
        yield groups, tuple(used)


def _groups(problem: Problem, tables: Tables, index: int, ep: int, size: int) -> list[Group]:
    pool = problem.pools[index]
    length = problem.job.sequence_length
    groups: list[Group] = []
    for tp, cp in itertools.product(problem.tensor_degrees(pool), problem.context_degrees()):
        if tp > 1 and (length // cp) % tp:
            continue
        for sequences in problem.sequence_counts():
            config = Config(pool.name, tp, cp, ep, sequences)
            if tables.get(config) is None:
                continue
            most = min(pool.num_chips // config.width, size // sequences)
            groups += [Group(config, copies) for copies in range(1, most + 1)]
    return groups
