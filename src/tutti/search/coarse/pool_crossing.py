"""The gradients' way between pipelines of different pools, roughly."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tutti.hardware.pool import Pool
from tutti.hardware.topology import Position
from tutti.search.pricing.unit_tables import Config
from tutti.search.question.space import Problem
from tutti.search.strategy.coarse_chain import Chain


class Crossing:
    """What traffic between chains adds to a step."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        element = problem.job.precision.gradients.num_bytes
        self._gradient_bytes = problem.model.num_trained * element
        self._pair_bandwidth: dict[tuple[str, ...], float] = {}

    def seconds(self, chains: Sequence[Chain]) -> float:
        """Return the gradient traffic between chains of different pools, roughly."""
        pools = [config.pool for chain in chains for config in chain.configs]
        if len(chains) < 2 or len(set(pools)) < 2:
            return 0.0
        slowest = 0.0
        for first, second in itertools.combinations(chains, 2):
            for one, other in itertools.product(first.configs, second.configs):
                if one.pool != other.pool:
                    slowest = max(slowest, self._pair_seconds((first, one), (second, other)))
        return slowest

    def _pair_seconds(self, *sides: tuple[Chain, Config]) -> float:
        """Return what the holders of a unit in two chains exchange and passes do not hide.

        Its reduction takes as long as the side needs whose chips carry most of it, and the chips
        of the shorter chain take part in the reductions of the most units, one after the other.
        """
        names = tuple(config.pool for _, config in sides)
        if names not in self._pair_bandwidth:
            cluster = self.problem.cluster
            link = cluster.link(*(first_chip(cluster.pool(name)) for name in names))
            self._pair_bandwidth[names] = 0.8 * link.contended_bandwidth
        carried = max(1.0 / self._sharing(chain, config) for chain, config in sides)
        stages = min(sum(chain.stages) for chain, _ in sides)
        volume = 1.5 * self._gradient_bytes * carried / stages
        hidden = 0.3 * min(chain.pace for chain, _ in sides)
        return max(0.0, volume / self._pair_bandwidth[names] - hidden)

    def _sharing(self, chain: Chain, config: Config) -> int:
        """Return how many chips of a side share the way of a unit's gradients to other pools.

        Copies that have shared gradients out (levels 2 and 3) each carry their part; otherwise the
        chips of an island do, over the NICs beside them.
        """
        if chain.shard >= 2:
            return config.width * chain.copies
        island = self.problem.cluster.pool(config.pool).node.largest_island
        return max(config.tp, min(island, config.width * chain.copies))


def first_chip(pool: Pool) -> Position:
    """Return a chip of a pool, for what they have in common."""
    return Position(pool.name, 0, 0)
