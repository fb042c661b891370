"""Which strategies are worth a simulation: arrangements of pools, and chains for them.

Arrangements and coarse chains are many; the best few of every schedule and shard level are refined.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tutti.hardware.pool import Pool
from tutti.search.coarse.pool_crossing import Crossing
from tutti.search.coarse.shortlist import Coarse
from tutti.search.cutting.build_draft import (
    Grouping,
    PipelineCopies,
    distinct_chains,
    groupings,
    split_batch,
)
from tutti.search.cutting.micro_batch_sizes import coarse_fluid_end, resized
from tutti.search.cutting.refine import Refiner
from tutti.search.pricing.objective import rates, value
from tutti.search.pricing.unit_tables import Tables
from tutti.search.question.effort import Effort
from tutti.search.question.exportable import joins
from tutti.search.strategy.candidate import Candidate
from tutti.search.strategy.coarse_chain import Chain, ScheduleOption
from tutti.search.strategy.matching import matching, possible
from tutti.search.thresholds import THRESHOLDS


class Candidates:
    """Finds the candidates of one search."""

    def __init__(self, tables: Tables, effort: Effort) -> None:
        self.tables = tables
        self.problem = tables.problem
        self.effort = effort
        self.coarse = Coarse(tables)
        self.crossing = Crossing(self.problem)
        self.refiner = Refiner(tables, self.crossing)
        self.per_second = rates(self.problem)
        self.places = {pool.name: place for place, pool in enumerate(self.problem.pools)}
        self._skipped = 0  # never cut, because others of their kind promise more

    @property
    def skipped(self) -> int:
        """How many were never cut, because others promise more."""
        return self._skipped + self.refiner.skipped

    @property
    def rejected(self) -> int:
        """How many were cut, but memory does not suffice."""
        return self.refiner.rejected

    def all(self) -> list[Candidate]:
        """Return chains for every arrangement of the pools, the most promising first."""
        names = [pool.name for pool in self.problem.pools]
        candidates: dict[object, Candidate] = {}
        rates = self._rates(names)
        for used in self._subsets(names, rates):
            for grouping in self._groupings(used):
                for candidate in self._arrange(grouping, rates):
                    known = candidates.get(candidate.key)
                    if known is None or candidate.coarse_seconds < known.coarse_seconds:
                        candidates[candidate.key] = candidate
        return self.refiner.refined([*self._seeds(), *self._promising(list(candidates.values()))])

    def _seeds(self) -> Iterator[Candidate]:
        """Yield the given strategies, with other sizes or fewer copies where counts ask for it."""
        for seed in self.effort.seeds:
            chosen = tuple(distinct_chains(seed))
            made = [resized(self.tables, chosen, seed, {})]
            made += [split_batch(c, self.problem.job.global_batch) for c in self._rounded(chosen)]
            for parts in made:
                if parts is not None and possible(parts, self.problem):
                    yield Candidate(tuple(distinct_chains(parts)), parts, 0.0)

    def _groupings(self, used: tuple[str, ...]) -> Sequence[Grouping]:
        """Return the arrangements of pools to look at; a warm start knows them."""
        if self.effort.groupings is not None:
            fitting = [g for g in self.effort.groupings if {n for c in g for n in c} == set(used)]
            if fitting:
                return fitting
        space, cluster = self.problem.space, self.problem.cluster
        # The first stages hold most micro-batches: much memory there, or at the end for the loss.
        roomy = tuple(sorted(used, key=lambda n: -cluster.pool(n).chip.memory_bytes))
        orders = dict.fromkeys((used, roomy, roomy[::-1], used[::-1]))
        if len(used) > 2:
            orders = dict.fromkeys((used, roomy, roomy[::-1]))
        return groupings(list(orders), mixed=space.mixed_pipelines, most=space.max_pipelines)

    def _promising(self, candidates: list[Candidate]) -> list[Candidate]:
        """Return the best few of every schedule, shard level and number of unlike pipelines.

        Between those the coarse model is not to be trusted: it flatters long chains of pools. On a
        large cluster single chains of different orders are told apart, too.
        Where experts are spread it errs most between narrow and wide replicas: the best few single
        chains that look unlike all of these come with them.
        """
        kinds: dict[tuple[ScheduleOption, int, int, object], list[Candidate]] = {}
        budget = 2 * self.effort.budget(self.problem.num_chips)
        short = [c for c in candidates if c.instructions <= budget]
        self._skipped += len(candidates) - len(short)
        candidates = short or candidates  # what takes too long to simulate only if all do
        for candidate in candidates:
            candidate.value = value(candidate.coarse_seconds, candidate.chips, self.per_second)
        for candidate in sorted(candidates, key=lambda c: (c.value, c.tie_break(self.places))):
            first = candidate.chains[0]
            told_apart = len(candidate.chains) == 1 and self._wide > 1
            pools = tuple(c.pool for c in first.configs) if told_apart else None
            key = (first.schedule, first.shard, len(candidate.chains), pools)
            kinds.setdefault(key, []).append(candidate)
        self._skipped += len(candidates)
        chosen = []
        most = self.effort.refinement(self.problem.num_chips)
        for (_, _, number, order), best in kinds.items():
            few = max(1, most // (1 if self.problem.model.num_experts else number))
            if order is not None:
                few = max(1, few // 2)
            chosen += best[:few]
            if self.problem.model.num_experts and number == 1:
                known = {c.widths for c in best[:few]}
                unlike = (c for c in best[few:] if c.widths not in known)
                chosen += itertools.islice(unlike, THRESHOLDS.unlike_candidates)
        self._skipped -= len(chosen)
        return chosen

    def _rates(self, names: Sequence[str]) -> dict[str, float]:
        """Return each pool's sequences per second by itself, as far as it can work alone."""
        rates: dict[str, float] = {}
        for name in names:
            pool = self.problem.cluster.pool(name)
            share = max(1.0, self.problem.job.global_batch * self._peak_share(pool, names))
            chains = self.coarse.chains((name,), share, 1)
            rates[name] = share / chains[0].seconds(share) if chains else 0.0
        return rates

    def _peak_share(self, pool: Pool, names: Sequence[str]) -> float:
        compute = self.problem.job.precision.compute
        cluster = self.problem.cluster
        total = sum(cluster.pool(n).peak_flops(compute, fallback=True) for n in names)
        return pool.peak_flops(compute, fallback=True) / total

    def _subsets(self, names: Sequence[str], rates: dict[str, float]) -> Iterator[tuple[str, ...]]:
        """Yield all pools, then without each slow one: it may only hold the others up.

        Where there is less than a sequence for every chip, fewer pools may well be faster, and each
        pool by itself wherever links are slow.
        """
        system = self.problem.space.exportable

        def joined(used: Sequence[str]) -> bool:
            return joins(map(self.problem.cluster.pool, used), system)

        if joined(names):
            yield tuple(names)
        if len(names) == 1 or not self.problem.space.idle:
            return
        total = sum(rates.values())
        scarce = self.problem.job.global_batch < self.problem.num_chips
        for size in range(len(names) - 1, 0, -1):
            for used in itertools.combinations(names, size):
                missing = total - sum(rates[name] for name in used)
                few = missing < 0.3 * total or not joined(names)
                alone = scarce or size == 1
                if joined(used) and (alone or few or self.per_second is not None):
                    yield used

    def _arrange(
        self, grouping: tuple[tuple[str, ...], ...], rates: dict[str, float]
    ) -> Iterator[Candidate]:
        """Yield combinations of good chains for the groups, with the batch shared out.

        Where none of a single group's best chains can take the whole batch in whole expert groups,
        those that can are looked for.
        """
        total = self.problem.job.global_batch
        weights = [
            sum(rates[name] or self._peak_share(self.problem.cluster.pool(name), group) * 1e-3
                for name in group)
            for group in grouping
        ]  # fmt: skip
        if sum(weights) <= 0:
            weights = [1.0] * len(grouping)
        lists: list[list[Chain]] = []
        chips = [sum(self.problem.cluster.pool(n).num_chips for n in group) for group in grouping]
        for group, weight, own in zip(grouping, weights, chips, strict=True):
            share = max(1.0, total * weight / sum(weights))
            sharing = sum(chips) / own
            most = self._most_chains * (self._wide if len(grouping) == 1 else 1)
            several = len(grouping) > 1
            lists.append(self.coarse.chains(group, share, most, sharing=sharing, elastic=several))
        if not all(lists):
            return
        arranged = list(self._shared_out(lists))
        if not arranged and len(grouping) == 1:
            lists = [self.coarse.chains(grouping[0], total, self._most_chains, even=True)]
            arranged = list(self._shared_out(lists))
        yield from arranged

    @property
    def _wide(self) -> int:
        """How many times as many single chains are looked at as others."""
        return self.effort.width(self.problem.num_chips)

    @property
    def _most_chains(self) -> int:
        """How many chains of a group are looked at; more where the coarse model errs more."""
        return self.effort.chains + (
            THRESHOLDS.more_chains if self.problem.model.num_experts else 0
        )

    def _shared_out(self, lists: list[list[Chain]]) -> Iterator[Candidate]:
        """Yield the candidates that combine one chain of each list, where batches come out even."""
        total = self.problem.job.global_batch
        for chosen in matching(lists):
            for chains in self._rounded(chosen):
                parts = split_batch(chains, total)
                if parts is None and len(chains) > 1 and self.problem.has_other_sizes:
                    parts = self._about(chains)
                if parts is None or not possible(parts, self.problem):
                    continue
                cross = self.crossing.seconds(chains)
                end = max(
                    p.chain.seconds(p.micro_batches * p.chain.copies * p.chain.sequences)
                    for p in parts
                )
                if len(chains) > 1 and self.problem.has_other_sizes:
                    end = min(end, THRESHOLDS.shared_badly * coarse_fluid_end(chains, total))
                yield Candidate(chains, parts, end + cross)

    def _about(self, chains: tuple[Chain, ...]) -> tuple[PipelineCopies, ...]:
        """Return parts that take about the batch; other sizes will make them add up."""
        total = self.problem.job.global_batch
        end = coarse_fluid_end(chains, total)
        counts = [max(1, round((end - chain.fill) / chain.pace)) for chain in chains]
        return tuple(
            PipelineCopies(chain=chain, copies=chain.copies, micro_batches=count)
            for chain, count in zip(chains, counts, strict=True)
        )

    def _rounded(self, chosen: tuple[Chain, ...]) -> Iterator[tuple[Chain, ...]]:
        """Yield a single chain also with fewer copies, where its counts come out even."""
        yield chosen
        if len(chosen) > 1:
            return
        chain, total = chosen[0], self.problem.job.global_batch
        rounds, rest = divmod(total, chain.copies * chain.sequences)
        if not rest and rounds:
            return
        for copies in range(chain.copies, 0, -1):
            if total % (copies * chain.sequences) == 0:
                yield (replace(chain, copies=copies),)
                return
