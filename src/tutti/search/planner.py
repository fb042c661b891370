"""The planner: coarse chains by the hundred thousand, exact cuts for the best, simulation decides.

Work is counted, not timed: the same question has the same answer on every machine. The bound
(`bound`) holds for everything a Plan can say, not only for what is enumerated here.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tutti.hardware.cluster import Pool
from tutti.hardware.topology import Position
from tutti.plan.plan import Plan
from tutti.search.bound import lower_bound
from tutti.search.build import Grouping, Part, cuts_of, groupings, split_batch
from tutti.search.chain import Cut
from tutti.search.coarse import Chain, Coarse
from tutti.search.draft import Draft
from tutti.search.infeasible import explain_infeasible
from tutti.search.objective import rates, value, value_bound
from tutti.search.pace import chain_seconds
from tutti.search.result import Alone, Pruned, SearchResult, Settled
from tutti.search.settle import Quick, SearchDisagreementError, Settler
from tutti.search.space import Problem
from tutti.search.summary import summary_of
from tutti.search.tables import Tables
from tutti.search.uniform import best_uniform
from tutti.simulate.estimate import Estimate

MOST_WHOLE = 5  # drafts that are simulated from the first micro-batch to the last
MOST_TRIED = 40  # candidates, while none of them fits
WORTH_A_LOOK = 1.01  # by how much the price of a candidate may err
UNFIT = 1.05  # held against the others of a kind of which one did not fit after all


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much work a search may do; a larger cluster earns more."""

    instructions: int = 60_000  # simulated, for candidates
    per_chip: int = 300
    most: int = 1_500_000
    candidates: int = 4
    most_candidates: int = 14  # as long as something left promises more
    whole: int = 2  # drafts simulated from the first micro-batch to the last, at least
    combined: int = 9  # chains of several groups, per schedule and shard level
    chains: int = 4  # per group of pools, schedule and shard level
    alone: int = 3  # candidates for each pool by itself
    polished: int = 2
    groupings: tuple[Grouping, ...] | None = None  # arrangements of pools; None: all likely ones
    seeds: tuple[Chain, ...] = ()  # strategies that are likely good: those of a warm start
    refined: int = 6  # candidates of every schedule and shard level whose chains are cut exactly

    def budget(self, num_chips: int) -> int:
        """Return the instructions that may be simulated."""
        return min(self.most, self.instructions + self.per_chip * num_chips)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A line for people who wait."""

    doing: str
    best_seconds: float | None = None
    lower_bound_seconds: float | None = None
    settled: int = 0


Report = Callable[[Progress], None]


def silent(progress: Progress) -> None:
    """Report nothing."""
    del progress


@dataclass(slots=True)
class Candidate:
    """Chains with their coarse price, and what simulation made of them."""

    chains: tuple[Chain, ...]
    parts: tuple[Part, ...]
    coarse_seconds: float
    value: float = 0.0  # of the objective, by the coarse price

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
    def chips(self) -> dict[str, int]:
        """How many chips of each pool take part."""
        used: dict[str, int] = {}
        for chain in self.chains:
            for config, stages in zip(chain.configs, chain.stages, strict=True):
                each = stages * config.width * (chain.sequences // config.sequences)
                used[config.pool] = used.get(config.pool, 0) + each * chain.copies
        return used

    @property
    def key(self) -> object:
        """What makes two candidates the same strategy."""
        return tuple(chain.key for chain in self.chains)


@dataclass(slots=True)
class _Found:
    """A draft that was priced by simulation."""

    draft: Draft
    seconds: float
    value: float  # of the objective
    key: object


@dataclass(slots=True)
class _State:
    """What a search has so far, best first, one entry per strategy."""

    found: list[_Found] = field(default_factory=list)
    rejected: int = 0
    skipped: int = 0

    @property
    def best(self) -> _Found | None:
        """The fastest so far."""
        return self.found[0] if self.found else None

    def take(self, found: _Found) -> None:
        """Keep a draft where its place is; the faster of two of one strategy."""
        known = next((f for f in self.found if f.key == found.key), None)
        if known is not None:
            if known.value <= found.value:
                return
            self.found.remove(known)
        self.found.append(found)
        self.found.sort(key=lambda f: f.value)


class Search:
    """One search over some pools of a problem."""

    def __init__(
        self, tables: Tables, effort: Effort, report: Report = silent, bound: float | None = None
    ) -> None:
        self.tables = tables
        self.problem = tables.problem
        self.effort = effort
        self.coarse = Coarse(tables)
        self.settler = Settler(tables)
        self.report = report
        self.bound = bound
        self.state = _State()
        self.interrupted = False
        element = self.problem.job.precision.gradients.num_bytes
        self._gradient_bytes = self.problem.model.num_parameters * element
        self.per_second = rates(self.problem)
        self._pair_bandwidth: dict[tuple[str, str], float] = {}

    def run(self) -> _State:
        """Settle the most promising candidates until the work is spent."""
        budget = self.effort.budget(self.problem.cluster.num_chips)
        try:
            left = self._candidates()
            corrections: dict[object, float] = {}
            for number in itertools.count():
                candidate = min(
                    left, key=lambda c: c.value * corrections.get(c.kind, 1.0), default=None
                )
                if candidate is None or self._enough(candidate, corrections, number, budget):
                    break
                left.remove(candidate)
                corrections[candidate.kind] = self._settle(candidate)
            self.state.skipped += len(left)
            self._polish()
        except KeyboardInterrupt:
            self.interrupted = True
        return self.state

    def _enough(
        self, candidate: Candidate, corrections: dict[object, float], number: int, budget: int
    ) -> bool:
        """Tell whether the best plan stands: nothing left promises more, or the work is done.

        What a kind of strategy turned out to take, over what it promised, is held against the
        others of its kind.
        """
        best = self.state.best
        if best is None:
            return number >= MOST_TRIED
        promised = candidate.value * corrections.get(candidate.kind, 1.0) / WORTH_A_LOOK
        if number >= self.effort.most_candidates or self.settler.instructions > 4 * budget:
            return True
        spent = number >= self.effort.candidates or self.settler.instructions > budget
        return promised >= best.value / (WORTH_A_LOOK if spent else 1.0)

    def worth(self, settled: Settled) -> float:
        """Return what the objective counts of a settled plan."""
        return self.plan_worth(settled.plan, settled.estimate)

    def plan_worth(self, plan: Plan, estimate: Estimate) -> float:
        """Return what the objective counts of a plan."""
        chips: dict[str, int] = {}
        for _, _, stage in plan.stages():
            for replica in stage.replicas:
                pool = replica.chips.pools[0]
                chips[pool] = chips.get(pool, 0) + replica.num_chips
        return value(estimate.step_seconds, chips, self.per_second)

    def _settle(self, candidate: Candidate) -> float:
        """Simulate a candidate; return what it takes over what it promised."""
        found = self.settler.parts(candidate.parts)
        if found is None:
            self.state.rejected += 1
            return UNFIT
        self._take(found, candidate.key)
        return found.seconds / candidate.coarse_seconds

    def _take(self, found: Quick, key: object) -> None:
        worth = value(found.seconds, found.draft.chips(), self.per_second)
        self.state.take(_Found(found.draft, found.seconds, worth, key))
        best = self.state.best
        self.report(
            Progress(
                doing="simulating",
                best_seconds=best.seconds if best is not None else None,
                lower_bound_seconds=self.bound,
                settled=self.settler.simulated,
            )
        )

    def _polish(self) -> None:
        """Try what the coarse model does not tell apart: where the chips of a copy lie."""
        for found in self.state.found[: self.effort.polished]:
            for change in self._changes(found.draft):
                draft = replace(found.draft, **change)
                quick = self.settler.quick(draft)
                if quick.fits:
                    self._take(quick, found.key)

    def _changes(self, draft: Draft) -> Iterator[dict[str, Any]]:
        deep = any(len(p.stages) > 1 for p in draft.pipelines)
        if deep and self.problem.cluster.fabric.oversubscribed:
            yield {"placement": "copy"}

    def _candidates(self) -> list[Candidate]:
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
        """Yield the given chains, also with fewer copies where their counts come out even."""
        for seed in self.effort.seeds:
            for chains in self._rounded((seed,)):
                parts = split_batch(chains, self.problem.job.global_batch)
                if parts is not None and _spreadable(parts):
                    yield Candidate(chains, parts, 0.0)

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
        return groupings(list(orders), mixed=space.mixed_pipelines, several=space.several_pipelines)

    def _promising(self, candidates: list[Candidate]) -> list[Candidate]:
        """Return the best few of every schedule and shard level."""
        kinds: dict[object, list[Candidate]] = {}
        budget = 2 * self.effort.budget(self.problem.cluster.num_chips)
        short = [c for c in candidates if c.instructions <= budget]
        self.state.skipped += len(candidates) - len(short)
        candidates = short or candidates  # what takes too long to simulate only if all do
        for candidate in candidates:
            candidate.value = value(candidate.coarse_seconds, candidate.chips, self.per_second)
        for candidate in sorted(candidates, key=lambda c: (c.value, str(c.key))):
            first = candidate.chains[0]
            kinds.setdefault((first.schedule, first.shard), []).append(candidate)
        self.state.skipped += len(candidates)
        chosen = [c for found in kinds.values() for c in found[: self.effort.refined]]
        self.state.skipped -= len(chosen)
        return chosen

    def _refined(self, candidates: list[Candidate]) -> list[Candidate]:
        """Cut the chains exactly and play their passes; drop what does not fit."""
        fitting: list[Candidate] = []
        known: dict[object, list[Cut] | None] = {}
        for candidate in candidates:
            parts = candidate.parts
            slowest = self._cross_seconds(candidate.chains)
            played = 0.0
            for chain in candidate.chains:
                own = tuple(part for part in parts if part.chain is chain)
                key = (id(chain), tuple((part.copies, part.micro_batches) for part in own))
                if key not in known:
                    known[key] = cuts_of(self.tables, own)
                cuts = known[key]
                if cuts is None:
                    break
                for part, cut in zip(own, cuts, strict=True):
                    played = max(played, chain_seconds(self.tables, part, cut))
            else:
                candidate.coarse_seconds = played + slowest
                candidate.value = value(candidate.coarse_seconds, candidate.chips, self.per_second)
                fitting.append(candidate)
        self.state.rejected += len(candidates) - len(fitting)
        return sorted(fitting, key=lambda c: (c.value, str(c.key)))

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
        """Yield all pools, then without each slow one: it may only hold the others up."""
        yield tuple(names)
        if len(names) == 1 or not self.problem.space.idle:
            return
        total = sum(rates.values())
        for size in range(len(names) - 1, 0, -1):
            for used in itertools.combinations(names, size):
                missing = total - sum(rates[name] for name in used)
                if missing < 0.3 * total or self.per_second is not None:
                    yield used

    def _arrange(
        self, grouping: tuple[tuple[str, ...], ...], rates: dict[str, float]
    ) -> Iterator[Candidate]:
        """Yield combinations of good chains for the groups, with the batch shared out."""
        total = self.problem.job.global_batch
        weights = [
            sum(rates[name] or self._peak_share(self.problem.cluster.pool(name), group) * 1e-3
                for name in group)
            for group in grouping
        ]  # fmt: skip
        if sum(weights) <= 0:
            weights = [1.0] * len(grouping)
        lists: list[list[Chain]] = []
        for group, weight in zip(grouping, weights, strict=True):
            share = max(1.0, total * weight / sum(weights))
            lists.append(self.coarse.chains(group, share, self.effort.chains))
        if not all(lists):
            return
        for chosen in _matching(lists, self.effort.combined):
            for chains in self._rounded(chosen):
                parts = split_batch(chains, total)
                if parts is None or not _spreadable(parts):
                    continue
                cross = self._cross_seconds(chains)
                end = max(
                    p.chain.seconds(p.micro_batches * p.chain.copies * p.chain.sequences)
                    for p in parts
                )
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
            link = cluster.link(_first_chip(cluster.pool(pool)), _first_chip(cluster.pool(other)))
            self._pair_bandwidth[pool, other] = 0.8 * link.contended_bandwidth
        chips = sum(n * c.width for c, n in zip(chain.configs, chain.stages, strict=True))
        volume = 1.5 * self._gradient_bytes / chips
        return max(0.0, volume / self._pair_bandwidth[pool, other] - 0.3 * chain.pace)


def _spreadable(parts: Sequence[Part]) -> bool:
    """Tell whether expert groups come out even: in all stages of all pipelines, or nowhere."""
    spread = {config.ep > 1 for part in parts for config in part.chain.configs}
    return len(spread) == 1 and all(
        part.copies * (part.chain.sequences // config.sequences) * config.width % config.ep == 0
        for part in parts
        for config in part.chain.configs
    )


def _matching(lists: list[list[Chain]], most: int) -> Iterator[tuple[Chain, ...]]:
    """Yield one chain of every list, all of one schedule and shard level, `most` of each kind."""
    kinds = dict.fromkeys((c.schedule.kind, c.shard) for c in lists[0])
    for kind in kinds:
        alike = [[c for c in chains if (c.schedule.kind, c.shard) == kind] for chains in lists]
        few = max(1, math.floor(most ** (1.0 / len(lists)) + 1e-9))
        yield from itertools.product(*(chains[:few] for chains in alike))


def _first_chip(pool: Pool) -> Position:
    return Position(pool.name, 0, 0)


def plan(
    problem: Problem,
    *,
    effort: Effort | None = None,
    report: Report = silent,
    compare: bool = True,
    bound: float | None = None,
) -> SearchResult:
    """Search the best plan and hold it against the best uniform plan and each pool alone.

    `bound` is a lower bound that is known already, such as that of a cluster with more nodes.
    """
    started = time.process_time()
    effort = effort or Effort()
    tables = Tables(problem)
    report(Progress(doing="bounding"))
    if bound is None:
        bound = lower_bound(tables)
    report(Progress(doing="pricing", lower_bound_seconds=bound))
    search = Search(tables, effort, report, bound)
    state = search.run()
    if state.best is None:
        raise explain_infeasible(tables, _first_fit)
    best, runner_up = _settled(search, state)
    uniform: Settled | str = "not looked for"
    alone: dict[str, Alone] = {}
    missing: dict[str, str] = {}
    interrupted = search.interrupted
    if compare and not interrupted:
        report(Progress(doing="comparing", best_seconds=best.step_seconds,
                        lower_bound_seconds=bound))  # fmt: skip
        try:
            uniform = _uniform(tables)
            if isinstance(uniform, Settled) and search.worth(uniform) < search.worth(best):
                best, runner_up = uniform, best  # nothing uneven pays here
            alone, missing = _alone(tables, effort, best)
        except KeyboardInterrupt:
            interrupted = True
    return SearchResult(
        best=best,
        value=search.worth(best),
        value_bound=value_bound(tables, _checked(bound, best)),
        lower_bound_seconds=_checked(bound, best),
        search_cpu_seconds=time.process_time() - started,
        objective=problem.objective,
        runner_up=runner_up,
        why_runner_up_lost=_why_lost(best, runner_up),
        uniform=uniform if isinstance(uniform, Settled) else None,
        uniform_missing=uniform if isinstance(uniform, str) else "",
        alone=alone,
        alone_missing=missing,
        pruned=_pruned(search, state),
        interrupted=interrupted,
        work={
            "priced": search.coarse.priced,
            "simulated": search.settler.simulated,
            "instructions": search.settler.instructions,
        },
    )


def _settled(search: Search, state: _State) -> tuple[Settled, Settled | None]:
    """Simulate the best drafts whole, until none that is left promises more; prove the first."""
    settler = search.settler
    whole: list[tuple[Plan, Estimate]] = []
    for number, found in enumerate(state.found[:MOST_WHOLE]):
        best_worth = min((search.plan_worth(*pair) for pair in whole), default=math.inf)
        if number >= search.effort.whole and found.value >= best_worth:
            break
        made = settler.plan_of(found.draft)
        whole.append((made, settler.price(made)))
    whole.sort(key=lambda pair: search.plan_worth(*pair))
    best = settler.prove(*whole[0], summary_of(whole[0][0]))
    if len(whole) == 1:
        return best, None
    made, estimate = whole[1]
    return best, Settled(plan=made, estimate=estimate, summary=summary_of(made))


def _checked(bound: float, best: Settled) -> float:
    """Return the bound; one that a plan beats is no bound."""
    if bound > best.step_seconds * (1.0 + 1e-9):
        raise SearchDisagreementError(
            f"the plan takes {best.step_seconds:.6g} s, less than the bound of {bound:.6g} s"
        )
    return min(bound, best.step_seconds)


def _why_lost(best: Settled, runner_up: Settled | None) -> str:
    if runner_up is None:
        return ""
    reasons = {
        "idle chips": runner_up.estimate.result.idle_share - best.estimate.result.idle_share,
        "recomputation": _recompute_share(runner_up.estimate) - _recompute_share(best.estimate),
    }
    reason, more = max(reasons.items(), key=lambda item: item[1])
    if more > 0.001:
        return f"{100 * more:.1f} points more {reason}"
    return "its chips compute in less efficient shapes"


def _recompute_share(found: Estimate) -> float:
    return (found.hfu - found.mfu) / found.hfu if found.hfu else 0.0


def _uniform(tables: Tables) -> Settled | str:
    settler = Settler(tables)
    found = best_uniform(tables, settler)
    if isinstance(found, str):
        return found
    return settler.prove(*found, summary_of(found[0]))


def _alone(
    tables: Tables, effort: Effort, best: Settled
) -> tuple[dict[str, Alone], dict[str, str]]:
    """Search each pool by itself with its share of the batch (DESIGN §5)."""
    problem = tables.problem
    pools = problem.pools
    if len(pools) == 1:
        pool = pools[0]
        batch = problem.job.global_batch
        return {pool.name: Alone(pool=pool.name, global_batch=batch, settled=best)}, {}
    found: dict[str, Alone] = {}
    missing: dict[str, str] = {}
    compute = problem.job.precision.compute
    total = sum(pool.peak_flops(compute, fallback=True) for pool in pools)
    for pool in pools:
        share = pool.peak_flops(compute, fallback=True) / total
        batch = math.ceil(problem.job.global_batch * share - 1e-9)
        smaller = problem.with_pool(pool, batch)
        for unlimited in (False, True):
            one = tables.for_problem(replace(smaller, unlimited_memory=unlimited))
            few = replace(
                effort, whole=1, candidates=effort.alone, most_candidates=2 * effort.alone
            )
            search = Search(one, few)
            state = search.run()
            if state.best is not None:
                settled, _ = _settled(search, state)
                found[pool.name] = Alone(
                    pool=pool.name, global_batch=batch, settled=settled, fits=not unlimited
                )
                break
        else:
            missing[pool.name] = "no strategy of the space divides its chips and batch"
    return found, missing


def _pruned(search: Search, state: _State) -> tuple[Pruned, ...]:
    found = [
        Pruned(
            what="coarse strategies",
            by="price of the vectorised model",
            count=max(0, search.coarse.priced - search.settler.simulated - state.skipped),
        )
    ]
    if state.skipped:
        found.append(Pruned(what="cut strategies", by="price or work budget", count=state.skipped))
    if state.rejected:
        by = "memory, after the exact cut"
        found.append(Pruned(what="strategies", by=by, count=state.rejected))
    return tuple(found)


def _first_fit(problem: Problem) -> Settled | None:
    """Return a plan that fits, with little effort; None where none was found."""
    search = Search(Tables(problem), Effort(candidates=3, chains=2, polished=0))
    state = search.run()
    return _settled(search, state)[0] if state.best is not None else None
