"""Candidates with their chains cut exactly and their passes played: prices to a percent or so.

Where whole micro-batches lose much, other sizes are tried; where experts are spread, other splits
of a replica's work.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from tutti.search.coarse.pool_crossing import Crossing
from tutti.search.cutting.build_draft import (
    Cuts,
    PipelineCopies,
    cuts_of,
    distinct_chains,
    split_batch,
)
from tutti.search.cutting.cut_chain import StageCut
from tutti.search.cutting.micro_batch_sizes import fluid_end, resized
from tutti.search.pricing.objective import rates, value
from tutti.search.pricing.pipeline_recurrence import chain_seconds, slowdown, timed
from tutti.search.pricing.unit_tables import NONE, Config, Tables
from tutti.search.strategy.candidate import Candidate
from tutti.search.strategy.coarse_chain import Chain
from tutti.search.strategy.matching import possible
from tutti.search.thresholds import THRESHOLDS


class Refiner:
    """Prices the candidates of one search."""

    def __init__(self, tables: Tables, crossing: Crossing) -> None:
        self.tables = tables
        self.problem = tables.problem
        self.crossing = crossing
        self.per_second = rates(self.problem)
        self.places = {pool.name: place for place, pool in enumerate(self.problem.pools)}
        self.skipped = 0  # never cut, because others promise more
        self.rejected = 0  # cut, but memory does not suffice

    def refined(self, candidates: list[Candidate]) -> list[Candidate]:
        """Cut the chains exactly and play their passes; drop what does not fit.

        Those that look far worse than the best so far has become are left alone.
        """
        known: Cuts = {}
        fitting: list[Candidate] = []
        best, rescued = math.inf, 0
        for candidate in sorted(candidates, key=lambda c: c.value):
            if (
                candidate.value > THRESHOLDS.hopeless * best
                or self._least(candidate) > THRESHOLDS.beaten * best
            ):
                self.skipped += 1
                continue
            whole = self._is_whole(candidate)
            priced = self._priced(candidate, known) if whole else None
            mends = not whole or self._is_split(candidate)
            if priced is None and mends and rescued < THRESHOLDS.resized:
                rescued += 1
                priced = self._resized(candidate, known)
            if priced is None:
                self.rejected += 1
                continue
            fitting.append(priced)
            best = min(best, priced.value)
        fitting.sort(key=lambda c: (c.value, c.tie_break(self.places)))
        fitting = self._with_other_sizes(fitting, known)
        if self.problem.model.num_experts:
            fitting[: THRESHOLDS.varied] = [
                self._varied(candidate, known) for candidate in fitting[: THRESHOLDS.varied]
            ]
            fitting.sort(key=lambda c: (c.value, c.tie_break(self.places)))
        return fitting

    def _least(self, candidate: Candidate) -> float:
        """Return a price that no cut of its chains goes below: that of chips that never wait."""
        rate = 0.0
        for chain in candidate.chains:
            tables = [self.tables.get(config) for config in chain.configs]
            with np.errstate(divide="ignore"):  # units that take no time
                speeds = [
                    stages / table.seconds[NONE]
                    for stages, table in zip(chain.stages, tables, strict=True)
                    if table is not None
                ]
            pace = float((1.0 / np.sum(speeds, axis=0)).sum()) * slowdown(self.tables, chain)
            rate += chain.copies * chain.sequences / pace
        seconds = self.problem.job.global_batch / rate
        return value(seconds, candidate.chips, self.per_second)

    def _with_other_sizes(self, candidates: list[Candidate], known: Cuts) -> list[Candidate]:
        """Return the candidates, and those with other sizes that whole micro-batches cost most."""
        if not candidates or not self.problem.has_other_sizes:
            return candidates
        limit = THRESHOLDS.played_within * candidates[0].value
        hopeful = [
            c for c in candidates if c.hoped < min((1.0 - THRESHOLDS.ragged) * c.value, limit)
        ]
        hopeful.sort(key=lambda c: (c.hoped, c.tie_break(self.places)))
        seen: Counter[object] = Counter()
        chosen: set[int] = set()
        for candidate in hopeful:
            if seen[candidate.kind] < THRESHOLDS.alike and len(chosen) < THRESHOLDS.resized:
                chosen.add(id(candidate))
            seen[candidate.kind] += 1
        other = [self._resized(c, known) for c in candidates if id(c) in chosen]
        candidates = [*candidates, *(c for c in other if c is not None)]
        return sorted(candidates, key=lambda c: (c.value, c.tie_break(self.places)))

    def _is_whole(self, candidate: Candidate) -> bool:
        """Tell whether the parts take just the batch; else other sizes have to make them do so."""
        taken = sum(p.copies * p.micro_batches * p.chain.sequences for p in candidate.parts)
        return taken == self.problem.job.global_batch

    def _is_split(self, candidate: Candidate) -> bool:
        """Tell whether few copies of a chain share states, because they take less than others."""
        return candidate.chains[0].shard >= 2 and len(candidate.parts) > len(candidate.chains)

    def _resized(self, candidate: Candidate, known: Cuts) -> Candidate | None:
        """Return a candidate with micro-batches of other sizes; None where they are no better."""
        parts = resized(self.tables, candidate.chains, candidate.parts, known)
        if parts is None or not possible(parts, self.problem):
            return None
        other = replace(candidate, chains=tuple(distinct_chains(parts)), parts=parts)
        priced = self._priced(other, known)
        if priced is not None and len(priced.chains) > len(candidate.chains):
            priced.value *= THRESHOLDS.unlike_copies
        return priced

    def _varied(self, candidate: Candidate, known: Cuts) -> Candidate:
        """Return a candidate whose replicas split their work in the best way.

        The coarse model holds tensor and context parallelism of one width for a detail. Where
        experts take most of the memory it decides what must be recomputed.
        """
        for place in [(c, k) for c, chain in enumerate(candidate.chains)
                      for k in range(len(chain.configs))]:  # fmt: skip
            for split in self._splits(candidate.chains[place[0]].configs[place[1]]):
                other = self._with_config(candidate, *place, split)
                priced = None if other is None else self._priced(other, known)
                if priced is not None and priced.value < candidate.value:
                    candidate = priced
        return candidate

    def _splits(self, config: Config) -> Iterator[Config]:
        """Yield the other ways to share a replica's work out over its chips."""
        pool = self.problem.cluster.pool(config.pool)
        for tp in self.problem.tensor_degrees(pool):
            for cp in self.problem.context_degrees():
                if tp * cp == config.width and tp != config.tp:
                    yield config._replace(tp=tp, cp=cp)

    def _with_config(
        self, candidate: Candidate, place: int, pool: int, config: Config
    ) -> Candidate | None:
        """Return a candidate with another configuration of one pool of one of its chains."""
        if self.tables.get(config) is None:
            return None
        old = candidate.chains[place]
        configs = (*old.configs[:pool], config, *old.configs[pool + 1 :])
        new = replace(old, configs=configs)
        chains = (*candidate.chains[:place], new, *candidate.chains[place + 1 :])
        parts = tuple(replace(p, chain=new) if p.chain is old else p for p in candidate.parts)
        return replace(candidate, chains=chains, parts=parts)

    def _priced(self, candidate: Candidate, known: Cuts) -> Candidate | None:
        """Return a candidate with the price of its cut chains; None where memory is too small.

        What unlike pipelines take of the batch follows from their cuts: it is shared out again.
        """
        cuts = cuts_of(self.tables, candidate.parts, known=known)
        if cuts is None:
            return None
        played = self._played(candidate.parts, cuts)
        if len(candidate.chains) > 1:
            again = self._shared_again(candidate, cuts, played)
            if again is not None and max(again[1]) < max(played):
                candidate, played = again
        candidate.coarse_seconds = max(played) + self.crossing.seconds(candidate.chains)
        candidate.value = value(candidate.coarse_seconds, candidate.chips, self.per_second)
        ragged = min(played) < (1.0 - THRESHOLDS.ragged) * max(played)  # some end before others
        candidate.hoped = self._hoped(candidate, known) if ragged else candidate.value
        return candidate

    def _hoped(self, candidate: Candidate, known: Cuts) -> float:
        """Return the price if micro-batches could be split, with all copies of a chain alike."""
        if not self.problem.has_other_sizes:
            return candidate.value
        whole = {id(p.chain): replace(p, copies=p.chain.copies) for p in reversed(candidate.parts)}
        parts = list(whole.values())
        cuts = cuts_of(self.tables, parts, known=known)
        if cuts is None:
            return candidate.value
        timings = [
            timed(self.tables, part, cut, seconds)
            for part, cut, seconds in zip(parts, cuts, self._played(parts, cuts), strict=True)
        ]
        figures = [(chain.rate, chain.fill) for chain in timings]
        seconds = fluid_end(figures, self.problem.job.global_batch)
        seconds += self.crossing.seconds(candidate.chains)
        return min(candidate.value, value(seconds, candidate.chips, self.per_second))

    def _played(self, parts: Sequence[PipelineCopies], cuts: Sequence[StageCut]) -> list[float]:
        """Return the seconds of each part."""
        return [chain_seconds(self.tables, *pair) for pair in zip(parts, cuts, strict=True)]

    def _shared_again(
        self, candidate: Candidate, cuts: Sequence[StageCut], played: Sequence[float]
    ) -> tuple[Candidate, list[float]] | None:
        """Share the batch out by what the cut chains take; None where it does not come out even."""
        exact: dict[int, tuple[Chain, StageCut]] = {}
        for part, cut, seconds in zip(candidate.parts, cuts, played, strict=True):
            exact.setdefault(id(part.chain), (timed(self.tables, part, cut, seconds), cut))
        if len(exact) < len(candidate.chains):
            return None  # one of them took nothing
        chains = tuple(exact[id(chain)][0] for chain in candidate.chains)
        parts = split_batch(chains, self.problem.job.global_batch)
        if parts is None or not possible(parts, self.problem):
            return None
        cut_of = {id(chain): cut for chain, cut in exact.values()}
        again = self._played(parts, [cut_of[id(part.chain)] for part in parts])
        return replace(candidate, chains=chains, parts=parts), again
