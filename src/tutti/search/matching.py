"""Which chains go together, and what their copies take of the pools."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from tutti.hardware.cluster import Pool
from tutti.hardware.topology import Position
from tutti.search.build import Part
from tutti.search.chains import Chain

MOST_TOGETHER = 64.5  # combinations of chains of several groups, per schedule and shard level


def chips_of(parts: Sequence[Part]) -> dict[str, int]:
    """Return how many chips of each pool take part."""
    used: dict[str, int] = {}
    for part in parts:
        chain = part.chain
        for config, stages in zip(chain.configs, chain.stages, strict=True):
            each = stages * config.width * (chain.sequences // config.sequences)
            used[config.pool] = used.get(config.pool, 0) + each * part.copies
    return used


def spreadable(parts: Sequence[Part]) -> bool:
    """Tell whether expert groups come out even: in all stages of all pipelines, or nowhere."""
    spread = {config.ep > 1 for part in parts for config in part.chain.configs}
    return len(spread) == 1 and all(
        part.copies * (part.chain.sequences // config.sequences) * config.width % config.ep == 0
        for part in parts
        for config in part.chain.configs
    )


def matching(lists: list[list[Chain]]) -> Iterator[tuple[Chain, ...]]:
    """Yield one chain of every list, all of one schedule and shard level."""
    if len(lists) == 1:
        yield from ((chain,) for chain in lists[0])
        return
    kinds = dict.fromkeys((c.schedule.kind, c.shard) for c in lists[0])
    few = math.floor(MOST_TOGETHER ** (1 / len(lists)))
    for kind in kinds:
        alike = [[c for c in chains if (c.schedule.kind, c.shard) == kind] for chains in lists]
        yield from itertools.product(*(chains[:few] for chains in alike))


def first_chip(pool: Pool) -> Position:
    """Return a chip of a pool, for what they have in common."""
    return Position(pool.name, 0, 0)
