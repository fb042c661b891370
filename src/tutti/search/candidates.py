"""Which strategies are worth a simulation: arrangements of pools, chains for them, exact cuts.

Arrangements and coarse chains are many; the best few of every schedule and shard level have their
chains cut exactly and their passes played, which prices them to a percent or so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tutti.hardware.cluster import Pool
from tutti.search.build import (
    Cuts,
    Grouping,
    Part,
    cuts_of,
    distinct_chains,
    groupings,
    split_batch,
)
from tutti.search.chain import Cut
from tutti.search.chains import Chain, ScheduleOption
from tutti.search.coarse import Coarse
from tutti.search.effort import Effort
from tutti.search.keeping import uses_enough
from tutti.search.matching import chips_of, first_chip, matching, spreadable
from tutti.search.objective import rates, value
from tutti.search.pace import chain_seconds, slowdown, timed
from tutti.search.resize import coarse_fluid_end, fluid_end, resized
from tutti.search.tables import NONE, Config, Tables

MORE_CHAINS = 2  # of every group of pools, where experts may be spread
UNLIKE = 8  # candidates of one schedule and shard level that are wide unlike the best ones
BEATEN = 1.02  # times the best so far: what all chips together need at the least
HOPELESS = 1.45  # times the best so far: exact cuts take 0.7 of the coarse price at the least
RESIZED = 6  # candidates whose micro-batches may have other sizes
RAGGED = 0.01  # of the step: what is lost to whole micro-batches before others are looked for
SHARED_BADLY = 1.02  # times the coarse price if micro-batches could be split: what other sizes take
VARIED = 24  # candidates whose replicas may split their work otherwise, where experts are spread


@dataclass(slots=True)
class Candidate:
    """Chains with their coarse price, and what simulation made of them."""

    chains: tuple[Chain, ...]
    parts: tuple[Part, ...]
    coarse_seconds: float
    value: float = 0.0  # of the objective, by the coarse price
    hoped: float = math.inf  # the same if micro-batches could be split

    @property
    def instructions(self) -> int:
        """About how many instructions its simulation plays."""
        return sum(
            7 * part.micro_batches * sum(part.chain.stages) * part.chain.schedule.virtual
            for part in self.parts
        )

    @property
    def kind(self) -> object:
        """What candidates have in common whose prices err alike."""
        first = self.chains[0]
        return (len(self.chains), first.schedule.kind, first.shard)

    @property
    def shape(self) -> object:
        """What candidates have in common that differ in their schedule only."""
        return tuple((c.configs, c.stages, c.copies, c.shard) for c in self.chains)

    @property
    def widths(self) -> object:
        """What candidates have in common that differ in orders and counts only."""
        return frozenset((c.width, c.ep) for chain in self.chains for c in chain.configs)

    @property
    def chips(self) -> dict[str, int]:
        """How many chips of each pool take part."""
        return chips_of(self.parts)

    @property
    def key(self) -> object:
        """What makes two candidates the same strategy."""
        return tuple(chain.key for chain in self.chains)


class Candidates:
    """Finds the candidates of one search."""

    def __init__(self, tables: Tables, effort: Effort) -> None:
        self.tables = tables
        self.problem = tables.problem
        self.effort = effort
        self.coarse = Coarse(tables)
        self.skipped = 0  # never cut, because others of their kind promise more
        self.rejected = 0  # cut, but memory does not suffice
        element = self.problem.job.precision.gradients.num_bytes
        self._gradient_bytes = self.problem.model.num_parameters * element
        self.per_second = rates(self.problem)
        self._pair_bandwidth: dict[tuple[str, str], float] = {}

    def all(self) -> list[Candidate]:
        """Return chains for every arrangement of the pools, the most promising first."""
        names = [pool.name for pool in self.problem.pools]
        found: dict[object, Candidate] = {}
        rates = self._rates(names)
        for used in self._subsets(names, rates):
            for grouping in self._groupings(used):
                for candidate in self._arrange(grouping, rates):
                    known = found.get(candidate.key)
                    if known is None or candidate.coarse_seconds < known.coarse_seconds:
                        found[candidate.key] = candidate
        return self._refined([*self._seeds(), *self._promising(list(found.values()))])

    def _seeds(self) -> Iterator[Candidate]:
        """Yield the given strategies, with other sizes or fewer copies where counts ask for it."""
        for seed in self.effort.seeds:
            chosen = tuple(distinct_chains(seed))
            made = [resized(self.tables, chosen, seed, {})]
            made += [split_batch(c, self.problem.job.global_batch) for c in self._rounded(chosen)]
            for parts in made:
                if parts is not None and self._possible(parts):
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
        self.skipped += len(candidates) - len(short)
        candidates = short or candidates  # what takes too long to simulate only if all do
        for candidate in candidates:
            candidate.value = value(candidate.coarse_seconds, candidate.chips, self.per_second)
        for candidate in sorted(candidates, key=lambda c: (c.value, str(c.key))):
            first = candidate.chains[0]
            told_apart = len(candidate.chains) == 1 and self._wide > 1
            pools = tuple(c.pool for c in first.configs) if told_apart else None
            key = (first.schedule, first.shard, len(candidate.chains), pools)
            kinds.setdefault(key, []).append(candidate)
        self.skipped += len(candidates)
        chosen = []
        for (_, _, number, order), found in kinds.items():
            few = max(1, self.effort.refined // (1 if self.problem.model.num_experts else number))
            if order is not None:
                few = max(1, few // 2)
            chosen += found[:few]
            if self.problem.model.num_experts and number == 1:
                known = {c.widths for c in found[:few]}
                unlike = (c for c in found[few:] if c.widths not in known)
                chosen += itertools.islice(unlike, UNLIKE)
        self.skipped -= len(chosen)
        return chosen

    def _refined(self, candidates: list[Candidate]) -> list[Candidate]:
        """Cut the chains exactly and play their passes; drop what does not fit.

        Those that look far worse than the best so far has become are left alone.
        """
        known: Cuts = {}
        fitting: list[Candidate] = []
        best = math.inf
        for candidate in sorted(candidates, key=lambda c: c.value):
            if candidate.value > HOPELESS * best or self._least(candidate) > BEATEN * best:
                self.skipped += 1
                continue
            priced = self._priced(candidate, known)
            if priced is None:
                self.rejected += 1
                continue
            fitting.append(priced)
            best = min(best, priced.value)
        fitting.sort(key=lambda c: (c.value, str(c.key)))
        fitting = self._with_other_sizes(fitting, known)
        if self.problem.model.num_experts:
            fitting[:VARIED] = [self._varied(candidate, known) for candidate in fitting[:VARIED]]
            fitting.sort(key=lambda c: (c.value, str(c.key)))
        return fitting

    def _least(self, candidate: Candidate) -> float:
        """Return a price that no cut of its chains goes below: that of chips that never wait."""
        rate = 0.0
        for chain in candidate.chains:
            tables = [self.tables.get(config) for config in chain.configs]
            speeds = [
                stages / table.seconds[NONE]
                for stages, table in zip(chain.stages, tables, strict=True)
                if table is not None
            ]
            pace = float((1.0 / sum(speeds)).sum()) * slowdown(self.tables, chain)
            rate += chain.copies * chain.sequences / pace
        seconds = self.problem.job.global_batch / rate
        return value(seconds, candidate.chips, self.per_second)

    def _with_other_sizes(self, found: list[Candidate], known: Cuts) -> list[Candidate]:
        """Return candidates, those with other sizes that lose most to whole micro-batches."""
        if not found or not self.problem.has_other_sizes:
            return found
        hopeful = [c for c in found if c.hoped < min((1.0 - RAGGED) * c.value, found[0].value)]
        hopeful.sort(key=lambda c: (c.hoped, str(c.key)))
        chosen = set(map(id, hopeful[:RESIZED]))
        found = [self._resized(c, known) if id(c) in chosen else c for c in found]
        return sorted(found, key=lambda c: (c.value, str(c.key)))

    def _resized(self, candidate: Candidate, known: Cuts) -> Candidate:
        """Return a candidate whose micro-batches have the sizes that share the batch out best."""
        parts = resized(self.tables, candidate.chains, candidate.parts, known)
        if parts is None or not self._possible(parts):
            return candidate
        other = replace(candidate, chains=tuple(distinct_chains(parts)), parts=parts)
        priced = self._priced(other, known)
        return priced if priced is not None and priced.value < candidate.value else candidate

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
                candidate, played, cuts = again
        candidate.coarse_seconds = max(played) + self._cross_seconds(candidate.chains)
        candidate.value = value(candidate.coarse_seconds, candidate.chips, self.per_second)
        candidate.hoped = candidate.value * min(1.0, self._evenness(candidate, cuts, played))
        return candidate

    def _evenness(
        self, candidate: Candidate, cuts: Sequence[Cut], played: Sequence[float]
    ) -> float:
        """Return what the step would take if micro-batches could be split, over what it takes."""
        if not self.problem.has_other_sizes:
            return 1.0
        exact: dict[int, tuple[float, float]] = {}
        for part, cut, seconds in zip(candidate.parts, cuts, played, strict=True):
            chain = timed(self.tables, part, cut, seconds)
            exact.setdefault(id(part.chain), (chain.rate, chain.fill))
        total = self.problem.job.global_batch
        return fluid_end(list(exact.values()), total) / max(played)

    def _played(self, parts: Sequence[Part], cuts: Sequence[Cut]) -> list[float]:
        """Return the seconds of each part."""
        return [chain_seconds(self.tables, *pair) for pair in zip(parts, cuts, strict=True)]

    def _shared_again(
        self, candidate: Candidate, cuts: Sequence[Cut], played: Sequence[float]
    ) -> tuple[Candidate, list[float], list[Cut]] | None:
        """Share the batch out by what the cut chains take; None where it does not come out even."""
        exact: dict[int, tuple[Chain, Cut]] = {}
        for part, cut, seconds in zip(candidate.parts, cuts, played, strict=True):
            exact.setdefault(id(part.chain), (timed(self.tables, part, cut, seconds), cut))
        if len(exact) < len(candidate.chains):
            return None  # one of them took nothing
        chains = tuple(exact[id(chain)][0] for chain in candidate.chains)
        parts = split_batch(chains, self.problem.job.global_batch)
        if parts is None or not self._possible(parts):
            return None
        cut_of = {id(chain): cut for chain, cut in exact.values()}
        own = [cut_of[id(part.chain)] for part in parts]
        return replace(candidate, chains=chains, parts=parts), self._played(parts, own), own

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

        Where there is less than a sequence for every chip, fewer pools may well be faster.
        """
        yield tuple(names)
        if len(names) == 1 or not self.problem.space.idle:
            return
        total = sum(rates.values())
        scarce = self.problem.job.global_batch < self.problem.num_chips
        for size in range(len(names) - 1, 0, -1):
            for used in itertools.combinations(names, size):
                missing = total - sum(rates[name] for name in used)
                if scarce or missing < 0.3 * total or self.per_second is not None:
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
        found = list(self._shared_out(lists))
        if not found and len(grouping) == 1:
            lists = [self.coarse.chains(grouping[0], total, self._most_chains, even=True)]
            found = list(self._shared_out(lists))
        yield from found

    @property
    def _wide(self) -> int:
        """How many times as many single chains are looked at as others."""
        return self.effort.width(self.problem.num_chips)

    @property
    def _most_chains(self) -> int:
        """How many chains of a group are looked at; more where the coarse model errs more."""
        return self.effort.chains + (MORE_CHAINS if self.problem.model.num_experts else 0)

    def _shared_out(self, lists: list[list[Chain]]) -> Iterator[Candidate]:
        """Yield the candidates that combine one chain of each list, where batches come out even."""
        total = self.problem.job.global_batch
        for chosen in matching(lists):
            for chains in self._rounded(chosen):
                parts = split_batch(chains, total)
                if parts is None or not self._possible(parts):
                    continue
                cross = self._cross_seconds(chains)
                end = max(
                    p.chain.seconds(p.micro_batches * p.chain.copies * p.chain.sequences)
                    for p in parts
                )
                if len(chains) > 1 and self.problem.has_other_sizes:
                    end = min(end, SHARED_BADLY * coarse_fluid_end(chains, total))
                yield Candidate(chains, parts, end + cross)

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

    def _possible(self, parts: Sequence[Part]) -> bool:
        """Tell whether expert groups come out even, and all chips are used that must be.

        Copies of a chain that take unequally many micro-batches are pipelines of their own.
        """
        most = self.problem.space.max_pipelines
        few = most is None or len(parts) <= most
        return few and spreadable(parts) and uses_enough(chips_of(parts), self.problem)

    def _cross_seconds(self, chains: tuple[Chain, ...]) -> float:
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
