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

from tutti.errors import InputError
from tutti.hardware.cluster import Pool
from tutti.hardware.topology import Position
from tutti.plan.job import ScheduleKind
from tutti.plan.plan import Plan
from tutti.search.bound import lower_bound
from tutti.search.build import Part, groupings, split_batch
from tutti.search.coarse import Chain, Coarse
from tutti.search.draft import Draft
from tutti.search.result import Alone, Pruned, SearchResult, Settled
from tutti.search.settle import Quick, SearchDisagreementError, Settler
from tutti.search.space import Problem
from tutti.search.summary import summary_of
from tutti.search.tables import Tables
from tutti.search.uniform import best_uniform
from tutti.simulate.estimate import Estimate

WORTH_A_LOOK = 1.06  # coarse price over the best simulated one, beyond which nothing is simulated


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much work a search may do; a larger cluster earns more."""

    instructions: int = 60_000  # simulated, for candidates
    per_chip: int = 300
    most: int = 1_500_000
    candidates: int = 24
    chains: int = 6  # per group of pools
    polished: int = 2

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


def _silent(progress: Progress) -> None:
    del progress


@dataclass(slots=True)
class Candidate:
    """Chains with their coarse price, and what simulation made of them."""

    chains: tuple[Chain, ...]
    parts: tuple[Part, ...]
    coarse_seconds: float

    @property
    def key(self) -> object:
        """What makes two candidates the same strategy: how a replica's chips split their work
        between tensor and context parallelism is a detail."""
        return tuple(
            (
                tuple((config.pool, config.width, config.sequences) for config in c.configs),
                c.stages,
                c.copies,
                c.schedule,
                c.shard,
            )
            for c in self.chains
        )


@dataclass(slots=True)
class _Found:
    """A draft that was priced by simulation."""

    draft: Draft
    seconds: float
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
            if known.seconds <= found.seconds:
                return
            self.found.remove(known)
        self.found.append(found)
        self.found.sort(key=lambda f: f.seconds)


class Search:
    """One search over some pools of a problem."""

    def __init__(
        self, tables: Tables, effort: Effort, report: Report = _silent, bound: float | None = None
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

    def run(self) -> _State:
        """Settle the most promising candidates until the work is spent."""
        budget = self.effort.budget(self.problem.cluster.num_chips)
        try:
            candidates = self._candidates()
            for number, candidate in enumerate(candidates):
                best = self.state.best
                if best is not None and (
                    self.settler.instructions > budget
                    or number >= self.effort.candidates
                    or candidate.coarse_seconds > WORTH_A_LOOK * best.seconds
                ):
                    self.state.skipped = len(candidates) - number
                    break
                self._settle(candidate)
            self._polish()
        except KeyboardInterrupt:
            self.interrupted = True
        return self.state

    def _settle(self, candidate: Candidate) -> None:
        found = self.settler.parts(candidate.parts)
        if found is None:
            self.state.rejected += 1
            return
        self._take(found, candidate.key)

    def _take(self, found: Quick, key: object) -> None:
        self.state.take(_Found(found.draft, found.seconds, key))
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
        """Try what the coarse model does not tell apart: schedules, placement, shard levels."""
        for found in self.state.found[: self.effort.polished]:
            for change in self._changes(found.draft):
                draft = replace(found.draft, **change)
                quick = self.settler.quick(draft)
                if quick.fits:
                    self._take(quick, found.key)

    def _changes(self, draft: Draft) -> Iterator[dict[str, Any]]:
        space = self.problem.space
        deep = any(len(p.stages) > 1 for p in draft.pipelines)
        plain = all(len(s.units) == 1 for p in draft.pipelines for s in p.stages)
        if deep and plain:
            for kind in space.schedules:
                if kind not in (draft.schedule, ScheduleKind.INTERLEAVED):
                    yield {"schedule": kind}
        if draft.shard in (1, 2):
            for level in (0, 1, 2):
                if level != draft.shard and level in space.shard:
                    yield {"shard": level}
        if deep and self.problem.cluster.fabric.oversubscribed:
            yield {"placement": "copy"}

    def _candidates(self) -> list[Candidate]:
        """Return chains for every arrangement of the pools, the most promising first."""
        names = [pool.name for pool in self.problem.pools]
        found: dict[object, Candidate] = {}
        rates = self._rates(names)
        for used in self._subsets(names, rates):
            space = self.problem.space
            for grouping in groupings(
                used, mixed=space.mixed_pipelines, several=space.several_pipelines
            ):
                for candidate in self._arrange(grouping, rates):
                    known = found.get(candidate.key)
                    if known is None or candidate.coarse_seconds < known.coarse_seconds:
                        found[candidate.key] = candidate
        return sorted(found.values(), key=lambda c: (c.coarse_seconds, str(c.key)))

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
                if missing < 0.3 * total:
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
            most = self.effort.chains if len(grouping) > 1 else 4 * self.effort.chains
            lists.append(self.coarse.chains(group, share, most))
        if not all(lists):
            return
        for chosen in itertools.product(*lists):
            if len({(c.schedule.kind, c.shard) for c in chosen}) > 1:
                continue
            for chains in self._rounded(chosen):
                parts = split_batch(chains, total)
                if parts is None:
                    continue
                cross = self._cross_seconds(chains)
                end = max(
                    p.micro_batches * p.chain.pace + p.chain.fill + p.chain.closing for p in parts
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
        cluster = self.problem.cluster
        model_bytes = self.problem.model.num_parameters * 4.0
        chips = sum(n * c.width for c, n in zip(chain.configs, chain.stages, strict=True))
        link = cluster.link(_first_chip(cluster.pool(pool)), _first_chip(cluster.pool(other)))
        volume = 1.5 * model_bytes / chips
        return max(0.0, volume / (link.contended_bandwidth * 0.8) - 0.3 * chain.pace)


def _first_chip(pool: Pool) -> Position:
    return Position(pool.name, 0, 0)


def plan(
    problem: Problem,
    *,
    effort: Effort | None = None,
    report: Report = _silent,
    compare: bool = True,
) -> SearchResult:
    """Search the best plan and hold it against the best uniform plan and each pool alone."""
    started = time.process_time()
    effort = effort or Effort()
    tables = Tables(problem)
    report(Progress(doing="bounding"))
    bound = lower_bound(tables)
    report(Progress(doing="pricing", lower_bound_seconds=bound))
    search = Search(tables, effort, report, bound)
    state = search.run()
    if state.best is None:
        raise explain_infeasible(tables)
    best, runner_up = _settled(search, state)
    uniform: Settled | str = "not looked for"
    alone: dict[str, Alone] = {}
    missing: dict[str, str] = {}
    if compare and not search.interrupted:
        uniform = _uniform(tables)
        alone, missing = _alone(tables, effort, best)
    return SearchResult(
        best=best,
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
        interrupted=search.interrupted,
        work={
            "priced": search.coarse.priced,
            "simulated": search.settler.simulated,
            "instructions": search.settler.instructions,
        },
    )


def _settled(search: Search, state: _State) -> tuple[Settled, Settled | None]:
    """Simulate the best two drafts whole; the faster one is the answer, and is proven."""
    settler = search.settler
    whole: list[tuple[Plan, Estimate]] = []
    for found in state.found[:2]:
        made = settler.plan_of(found.draft)
        whole.append((made, settler.price(made)))
    whole.sort(key=lambda pair: pair[1].step_seconds)
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
    slower = runner_up.step_seconds / best.step_seconds - 1.0
    reasons = {
        "idle chips": runner_up.estimate.result.idle_share - best.estimate.result.idle_share,
        "recomputation": _recompute_share(runner_up.estimate) - _recompute_share(best.estimate),
    }
    reason, more = max(reasons.items(), key=lambda item: item[1])
    text = f"{100 * slower:.1f} % slower"
    return f"{text}: {100 * more:.1f} points more {reason}" if more > 0.001 else text


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
            search = Search(one, effort)
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


def explain_infeasible(tables: Tables) -> InputError:
    """Return the error that says what is tightest and what would help."""
    return InputError("no plan fits")
