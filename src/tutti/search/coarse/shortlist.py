"""Coarse strategies by the hundred thousand: which kinds of chains are worth a closer look.

A *chain* is one copy of a pipeline: some pools in sequence, each with its degrees and number of
stages. Copies of a chain fill the pools. Everything here is arrays over (combination of degrees,
number of copies, schedule) and approximate: equal blocks, memory by the fullest stage of each
pool, traffic by its volume. What comes out in front is cut, placed and simulated exactly.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tutti.search.coarse.grid import Grid
from tutti.search.coarse.pool_options import Options, thinned
from tutti.search.pricing.unit_tables import Config, Tables
from tutti.search.strategy.coarse_chain import Chain, ScheduleOption, schedule_options
from tutti.search.thresholds import THRESHOLDS

FloatArray = npt.NDArray[np.float64]


class Coarse:
    """Ranks chains over given pools."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.problem = tables.problem
        self.priced = 0
        self._options: dict[tuple[str, bool], Options | None] = {}

    def _pool(self, name: str, *, chained: bool) -> Options | None:
        key = (name, chained)
        if key not in self._options:
            problem, pool = self.problem, self.problem.cluster.pool(name)
            counts = [
                b
                for b in problem.sequence_counts()
                if not chained or b <= THRESHOLDS.chained_sequences
            ]
            configs = [
                Config(name, tp, cp, ep, b)
                for tp in problem.tensor_degrees(pool)
                for cp in problem.context_degrees()
                for ep in problem.expert_degrees()
                for b in counts
                if tp * cp <= pool.num_chips and ep <= pool.num_chips
            ]
            self._options[key] = Options.of(self.tables, name, configs, chained=chained)
        return self._options[key]

    def chains(
        self,
        pools: tuple[str, ...],
        sequences: float,
        most: int,
        *,
        even: bool = False,
        sharing: float = 1.0,
        elastic: bool = False,
    ) -> list[Chain]:
        """Return the most promising chains over pools in this order, best first.

        `most` are taken of every schedule and shard level, for between those the coarse model is
        not to be trusted. `sequences` is what all copies together are to take of a step; with
        `even`, only chains that can take just so many, their expert groups whole. `sharing` says
        by how much more chips share states at level 1, because other pipelines hold the same units.
        With `elastic` they take about so many, in whole micro-batches; others take the rest.
        """
        options = [self._pool(name, chained=len(pools) > 1) for name in pools]
        if any(shortlisted is None for shortlisted in options):
            return []
        known = thinned([shortlisted for shortlisted in options if shortlisted is not None])
        grid = Grid(self.problem, known, sequences, sharing, elastic=elastic)
        if even:
            grid.keep_even(int(sequences))
        if not grid.size:
            return []
        shortlisted: list[Chain] = []
        plain = grid.plain_pace()
        for schedule in schedule_options(self.problem):
            for shard in self.problem.space.shard:
                shortlisted += self._best(grid, plain, shard, schedule, most)

        def order(chain: Chain) -> tuple[object, ...]:
            price = chain.elastic_seconds if elastic else chain.seconds
            return (price(sequences), chain.configs, chain.stages)

        return sorted(shortlisted, key=order)

    def _best(
        self, grid: Grid, plain: FloatArray, shard: int, schedule: ScheduleOption, most: int
    ) -> list[Chain]:
        self.priced += grid.size
        priced = grid.price(plain, shard, schedule)
        seconds = priced.seconds
        likely = np.argpartition(seconds, min(8 * most, len(seconds) - 1))[: 8 * most]
        likely = likely[np.lexsort((likely, seconds[likely]))]
        best: dict[object, Chain] = {}
        for i in likely.tolist():
            if not np.isfinite(seconds[i]) or len(best) == most:
                break
            chain = priced.chain(i)
            best.setdefault(chain.key, chain)
        return list(best.values())
