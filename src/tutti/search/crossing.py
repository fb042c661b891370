"""The gradients' way between pipelines of different pools, roughly."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tutti.hardware.cluster import Pool
from tutti.hardware.topology import Position
from tutti.search.chains import Chain
from tutti.search.space import Problem


class Crossing:
    """What traffic between chains adds to a step."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        element = problem.job.precision.gradients.num_bytes
        self._gradient_bytes = problem.model.num_parameters * element
        self._pair_bandwidth: dict[tuple[str, str], float] = {}

    def seconds(self, chains: Sequence[Chain]) -> float:
        """Return the gradient traffic between chains of different pools, roughly."""
        pools = [config.pool for chain in chains for config in chain.configs]
        if len(chains) < 2 or len(set(pools)) < 2:
            return 0.0
        slowest = 0.0
        for first, second in itertools.combinations(chains, 2):
            for one, other in itertools.product(first.configs, second.configs):
                if one.pool == other.pool:
                    continue
                slowest = max(slowest, self._pair_seconds(first, one.pool, other.pool))
        return slowest

    def _pair_seconds(self, chain: Chain, pool: str, other: str) -> float:
        if (pool, other) not in self._pair_bandwidth:
            cluster = self.problem.cluster
            link = cluster.link(first_chip(cluster.pool(pool)), first_chip(cluster.pool(other)))
            self._pair_bandwidth[pool, other] = 0.8 * link.contended_bandwidth
        # Copies reduce among themselves first; each then carries its part between the pools.
        chips = sum(n * c.width for c, n in zip(chain.configs, chain.stages, strict=True))
        volume = 1.5 * self._gradient_bytes / (chips * chain.copies)
        return max(0.0, volume / self._pair_bandwidth[pool, other] - 0.3 * chain.pace)


def first_chip(pool: Pool) -> Position:
    """Return a chip of a pool, for what they have in common."""
    return Position(pool.name, 0, 0)
