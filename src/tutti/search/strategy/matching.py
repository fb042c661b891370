"""Which chains go together, and what their copies take of the pools."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tutti.plan.schedules import PLAIN
from tutti.search.cutting.build_draft import PipelineCopies
from tutti.search.question.space import Problem
from tutti.search.strategy.coarse_chain import Chain, ScheduleOption
from tutti.search.strategy.space_limits import uses_enough
from tutti.search.thresholds import THRESHOLDS


def chips_of(parts: Sequence[PipelineCopies]) -> dict[str, int]:
    """Return how many chips of each pool take part."""
    used: dict[str, int] = {}
    for part in parts:
        chain = part.chain
        for config, stages in zip(chain.configs, chain.stages, strict=True):
            each = stages * config.width * (chain.sequences // config.sequences)
            used[config.pool] = used.get(config.pool, 0) + each * part.copies
    return used


def spreadable(parts: Sequence[PipelineCopies]) -> bool:
    """Tell whether expert groups come out even: in all stages of all pipelines, or nowhere."""
    spread = {config.ep > 1 for part in parts for config in part.chain.configs}
    return len(spread) == 1 and all(
        part.copies * (part.chain.sequences // config.sequences) * config.width % config.ep == 0
        for part in parts
        for config in part.chain.configs
    )


def possible(parts: Sequence[PipelineCopies], problem: Problem) -> bool:
    """Tell whether expert groups come out even, and all chips are used that must be.

    Copies of a chain that take unequally many micro-batches are pipelines of their own.
    """
    most = problem.space.max_pipelines
    few = most is None or len(parts) <= most
    return few and spreadable(parts) and uses_enough(chips_of(parts), problem)


def matching(lists: list[list[Chain]]) -> Iterator[tuple[Chain, ...]]:
    """Yield one chain of every list, all of one schedule and shard level.

    A chain of one stage has the same passes under every schedule: it goes with all of them.
    """
    if len(lists) == 1:
        yield from ((chain,) for chain in lists[0])
        return
    kinds = dict.fromkeys((c.schedule.kind, c.shard) for chains in lists for c in chains)
    few = math.floor(THRESHOLDS.chains_together ** (1 / len(lists)))
    for kind, shard in kinds:
        option = ScheduleOption(kind=kind)
        alike = [
            [
                c if c.schedule.kind is kind else replace(c, schedule=option)
                for c in chains
                if c.shard == shard and (c.schedule.kind is kind or sum(c.stages) == 1)
            ]
            for chains in lists
        ]
        for chosen in itertools.product(*(chains[:few] for chains in alike)):
            if kind is PLAIN or any(sum(c.stages) > 1 for c in chosen):
                yield chosen
