"""The planner: coarse chains by the hundred thousand, exact cuts for the best, simulation decides.

Work is counted, not timed: the same question has the same answer on every machine. The bound
(`bound`) holds for everything a Plan can say, not only for what is enumerated here.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from dataclasses import replace

from tutti.errors import StoppedError
from tutti.hardware.cluster import Pool
from tutti.plan.plan import Plan
from tutti.search.bound import lower_bound
from tutti.search.build import Part
from tutti.search.candidate import Candidate
from tutti.search.candidates import Candidates
from tutti.search.effort import Effort, Progress, Report, silent
from tutti.search.exact import search_exactly
from tutti.search.found import MOST_WHOLE, Found, State
from tutti.search.infeasible import explain_infeasible
from tutti.search.keeping import plan_keeps
from tutti.search.objective import rates, value, value_bound
from tutti.search.polish import Polish
from tutti.search.result import Alone, Pruned, SearchResult, Settled
from tutti.search.settle import (
    SHORTENED_WITHIN,
    Quick,
    SearchDisagreementError,
    Settler,
    require_agreement,
)
from tutti.search.skeletons import TooLargeError
from tutti.search.space import Problem
from tutti.search.summary import summary_of
from tutti.search.tables import Tables
from tutti.search.ties import splitting
from tutti.search.uniform import best_uniform
from tutti.simulate.estimate import Estimate

SMALL_CHIPS, SMALL_BATCH = 8, 64  # beyond which no space is small
MOST_TRIED = 40  # candidates, while none of them fits
WORTH_A_LOOK = 1.01  # by how much the price of a candidate may err
WORTH_EVENING = 0.998  # of the best, what other shares of the batch must promise to be simulated
WORTH_MORE = 0.998  # of the best, what is left must promise once the work is spent
FALSE_PROMISE = 1.01  # by which more than the schedule was priced wrongly
CURIOUS = 2  # candidates of a kind that are given the benefit of the doubt
BELIEVED = 0.97  # of what they promise
ALONE_PARTS = 32  # of a pool's batch alone: it is rounded up to one of the next power of two
UNFIT = 1.05  # held against the others of a kind of which one did not fit after all


class Search:
    """One search over some pools of a problem."""

    def __init__(
        self, tables: Tables, effort: Effort, report: Report = silent, bound: float | None = None
    ) -> None:
        self.tables = tables
        self.problem = tables.problem
        self.effort = effort
        self.source = Candidates(tables, effort)
        self.settler = Settler(tables)
        self.report = report
        self.bound = bound
        self.state = State()
        self.interrupted = False
        self.per_second = rates(self.problem)
        self.corrections: dict[object, float] = {}  # by kind and by shape of candidates
        self.curious_until = 0  # instructions
        self.seen: Counter[object] = Counter()  # candidates that were settled, by kind

    def run_exactly(self) -> State | None:
        """Search a small space whole; None where it is too large, or nothing in it fits."""
        problem = self.problem
        small = problem.num_chips <= SMALL_CHIPS and problem.job.global_batch <= SMALL_BATCH
        if not small or self.per_second is not None or self.tables.layers:
            return None
        try:
            found = search_exactly(problem, self.tables, self.effort.exact)
        except TooLargeError:
            return None
        except KeyboardInterrupt:
            self.interrupted = True
            return None
        if found is None:
            return None
        self.settler.simulated += found.simulated
        self.state.take(Found(found.draft, found.step_seconds, found.step_seconds, "exact"))
        return self.state

    @property
    def may_have_more(self) -> bool:
        """Whether the space has plans that the exact search leaves out: of three pipelines."""
        most = self.problem.space.max_pipelines
        return len(self.problem.pools) > 2 and (most is None or most > 2)

    def run(self) -> State:
        """Settle the most promising candidates until the work is spent."""
        budget = self.effort.budget(self.problem.num_chips)
        if self.effort.width(self.problem.num_chips) > 1:
            self.curious_until = budget // 2
        try:
            left = self.source.all()
            for number in itertools.count():
                candidate = min(left, key=self._promise, default=None)
                if candidate is None or self._enough(candidate, number, budget):
                    break
                left.remove(candidate)
                found = self._settle(candidate)
                self.corrections[candidate.kind] = self.corrections[candidate.shape] = found
                self.seen[candidate.kind] += 1
            self.state.skipped += len(left)
            self._improve()
            self._polish()
        except KeyboardInterrupt:
            self.interrupted = True
        return self.state

    def _promise(self, candidate: Candidate) -> float:
        """Return what a candidate is likely worth.

        What others of its kind took, over what they promised, is held against it; so is what the
        same chains took under another schedule, where no schedule explains it. On a large cluster
        the first few of a kind are believed to be better than that.
        """
        same = self.corrections.get(candidate.shape, 1.0)
        if same < FALSE_PROMISE:
            same = self.corrections.get(candidate.kind, 1.0)
        early = self.settler.instructions + candidate.instructions < self.curious_until
        if early and self.seen[candidate.kind] < CURIOUS:
            same *= BELIEVED
        return candidate.value * same

    def _enough(self, candidate: Candidate, number: int, budget: int) -> bool:
        """Tell whether the best plan stands: nothing left promises more, or the work is done."""
        best = self.state.best
        if best is None:
            return number >= MOST_TRIED
        promised = self._promise(candidate)
        if number >= self.effort.most_candidates or self.settler.instructions > 4 * budget:
            return True
        fitting = number - self.state.rejected  # what did not fit taught little
        enough = self.effort.candidates * self.effort.width(self.problem.num_chips)
        spent = fitting >= enough or self.settler.instructions > budget
        well_known = self.seen[candidate.kind] > CURIOUS
        return promised >= best.value * (WORTH_MORE if spent or well_known else WORTH_A_LOOK)

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
        self._take(found, candidate.key, candidate.parts)
        return found.seconds / candidate.coarse_seconds

    def _take(self, found: Quick, key: object, parts: tuple[Part, ...] = ()) -> None:
        worth = value(found.seconds, found.draft.chips(), self.per_second)
        settled = replace(found, whole=None)
        self.state.take(Found(found.draft, found.seconds, worth, key, found.whole, parts, settled))
        self._even(found, key)
        best = self.state.best
        self.report(
            Progress(
                doing="simulating",
                best_seconds=best.seconds if best is not None else None,
                lower_bound_seconds=self.bound,
                settled=self.settler.simulated,
            )
        )

    def _even(self, found: Quick, key: object) -> None:
        """Try the micro-batches that the paces ask for, where that would be the best so far."""
        evened, best = found.evened, self.state.best
        assert best is not None
        chips = evened.draft.chips()
        hoped = value(evened.seconds, chips, self.per_second)
        if evened is found or hoped > best.value * WORTH_EVENING:
            return
        again = self.settler.quick(evened.draft)
        if again.fits:
            worth = value(again.seconds, chips, self.per_second)
            self.state.take(Found(again.draft, again.seconds, worth, (key, "evened"), again.whole))

    def _improve(self) -> None:
        """Take small steps from the best strategies, where a cluster is large enough to earn it."""
        polish = Polish(self.settler, self.effort.improvement(self.problem.num_chips))
        settled = [found for found in self.state.found if found.settled is not None]
        for found in settled[: self.effort.improved]:
            assert found.settled is not None
            better = polish.improved(found.parts, found.settled)
            if better is not found.settled:
                self._take(better, found.key, found.parts)

    def _polish(self) -> None:
        """Try what the coarse model does not tell apart: stages of a copy side by side."""
        if not self.problem.cluster.fabric.oversubscribed:
            return
        for found in self.state.found[: self.effort.polished]:
            if any(len(pipeline.stages) > 1 for pipeline in found.draft.pipelines):
                quick = self.settler.quick(replace(found.draft, placement="copy"))
                if quick.fits:
                    self._take(quick, found.key)


def plan(
    problem: Problem,
    *,
    effort: Effort | None = None,
    report: Report = silent,
    compare: bool = True,
    bound: float | None = None,
    tables: Tables | None = None,
) -> SearchResult:
    """Search the best plan and hold it against the best uniform plan and each pool alone.

    `bound` is a lower bound that is known already, such as that of a cluster with more nodes;
    `tables` are those of the same question in a larger space.
    """
    started = time.process_time()
    effort = effort or Effort()
    tables = Tables(problem) if tables is None else tables.for_problem(problem)
    report(Progress(doing="bounding"))
    if bound is None:
        bound = lower_bound(tables)
    report(Progress(doing="pricing", lower_bound_seconds=bound))
    search = Search(tables, effort, report, bound)
    state = search.run_exactly()
    if state is None or search.may_have_more:
        state = search.run()
    if state.best is None:
        if search.interrupted:
            raise StoppedError("stopped before the first plan was found")
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
            if (
                isinstance(uniform, Settled)
                and plan_keeps(uniform.plan, problem)
                and search.worth(uniform) < search.worth(best)
            ):
                best, runner_up = uniform, best  # nothing uneven pays here
            alone, missing = _alone(tables, effort, best)
        except KeyboardInterrupt:
            interrupted = True
    best = search.settler.prove_again(best)
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
            "priced": search.source.coarse.priced,
            "simulated": search.settler.simulated,
            "instructions": search.settler.instructions,
        },
    )


def _settled(search: Search, state: State) -> tuple[Settled, Settled | None]:
    """Simulate the best drafts whole, until none that is left promises more; prove the first."""
    settler = search.settler
    whole: list[tuple[Plan, Estimate]] = []
    for number, found in enumerate(state.found[:MOST_WHOLE]):
        best_worth = min((search.plan_worth(*pair) for pair in whole), default=math.inf)
        if number >= search.effort.whole and found.value >= best_worth:
            break
        if found.whole is None:
            made = settler.plan_of(found.draft)
            found.whole = (made, settler.price(made))
            seconds = found.whole[1].step_seconds
            require_agreement(summary_of(made), found.seconds, seconds, SHORTENED_WITHIN)
        whole.append(found.whole)
    # what differs by rounding only is equal: then the plan that splits less
    whole.sort(key=lambda pair: (float(f"{search.plan_worth(*pair):.9e}"), splitting(pair[0])))
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
        batch = _divisible(problem, pool, problem.job.global_batch * share)
        smaller = problem.with_pool(pool, batch)
        for unlimited in (False, True):
            one = tables.for_problem(replace(smaller, unlimited_memory=unlimited))
            few = replace(
                effort, whole=1, candidates=effort.alone, most_candidates=2 * effort.alone, wider=1,
                instructions=effort.instructions // 4, per_chip=effort.per_chip // 4,
            )  # fmt: skip
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


def _divisible(problem: Problem, pool: Pool, sequences: float) -> int:
    """Return a pool's batch, rounded up by 1/32 at most; with experts to what an island takes.

    A prime number of sequences has no equal replicas and shuts out every way to spread experts: it
    would flatter the mix.
    """
    step = 1 << max(0, math.floor(math.log2(max(1.0, sequences) / ALONE_PARTS)))
    if problem.model.num_experts:
        step = math.lcm(step, pool.node.largest_island)
    return step * math.ceil(sequences / step - 1e-9)


def _pruned(search: Search, state: State) -> tuple[Pruned, ...]:
    source = search.source
    skipped, rejected = state.skipped + source.skipped, state.rejected + source.rejected
    found = [
        Pruned(
            what="coarse strategies",
            by="price of the vectorised model",
            count=max(0, source.coarse.priced - search.settler.simulated - skipped),
        )
    ]
    if skipped:
        found.append(Pruned(what="cut strategies", by="price or work budget", count=skipped))
    if rejected:
        by = "memory, after the exact cut"
        found.append(Pruned(what="strategies", by=by, count=rejected))
    return tuple(found)


def _first_fit(problem: Problem) -> Settled | None:
    """Return a plan that fits, with little effort; None where none was found."""
    search = Search(Tables(problem), Effort(candidates=3, chains=2, polished=0))
    state = search.run()
    return _settled(search, state)[0] if state.best is not None else None
