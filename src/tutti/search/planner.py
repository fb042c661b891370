"""The planner: coarse chains by the hundred thousand, exact cuts for the best, simulation decides.

Work is counted, not timed: the same question has the same answer on every machine. The bound
(`bound`) holds for everything a Plan can say, not only for what is enumerated here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tutti.errors import StoppedError
from tutti.hardware.pool import Pool
from tutti.plan.plan import Plan
from tutti.search.answer.infeasible import explain_infeasible
from tutti.search.answer.restore import restored_result
from tutti.search.answer.result import Alone, ProvenPlan, Pruned, SearchResult
from tutti.search.answer.uniform_baseline import best_uniform
from tutti.search.bound.lower_bound import lower_bound
from tutti.search.candidate_loop import Search, proven_best, search_parts
from tutti.search.improve.plan_search import PlanSearch
from tutti.search.pricing.money_and_energy import spending_of
from tutti.search.pricing.objective import value_bound
from tutti.search.pricing.simulate_draft import DraftSimulator, SearchDisagreementError
from tutti.search.pricing.unit_tables import Tables
from tutti.search.question.canonical_pools import canonical_question
from tutti.search.question.effort import Effort, Progress, Report, silent
from tutti.search.question.space import Problem
from tutti.search.smaller_questions import take_smaller
from tutti.search.strategy.priced_drafts import RankedDrafts
from tutti.search.strategy.space_limits import exports, plan_keeps
from tutti.search.strategy.summary import summary_of
from tutti.search.thresholds import THRESHOLDS
from tutti.simulate.estimate import Estimate


@dataclass(slots=True)
class Rivals:
    """What the best plan is held against."""

    uniform: ProvenPlan | str = "not looked for"
    faster: ProvenPlan | None = None  # the uniform plan, where it beats what was found
    alone: dict[str, Alone] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


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
    if tables is not None or effort.seeds:  # whose pools have the names that were given
        return _answered(problem, effort, report, tables, compare=compare, bound=bound)
    question = canonical_question(problem)
    result = _answered(question.problem, effort, report, None, compare=compare, bound=bound,
                       asked=problem)  # fmt: skip
    given_back = restored_result(question, result)
    if given_back is None:  # chips of one replica lie in two of the user's pools
        given_back = _answered(problem, effort, report, None, compare=compare, bound=bound)
    return replace(given_back, search_cpu_seconds=time.process_time() - started)


def _answered(
    problem: Problem,
    effort: Effort,
    report: Report,
    tables: Tables | None,
    *,
    compare: bool,
    bound: float | None,
    asked: Problem | None = None,
) -> SearchResult:
    """Answer a question whose pools are in the one form, or named by the caller.

    `asked` is the question as the user wrote it: what is infeasible is explained in its words.
    """
    started = time.process_time()
    tables = Tables(problem) if tables is None else tables.for_problem(problem)
    report(Progress(doing="bounding"))
    if bound is None:
        bound = lower_bound(tables)
    report(Progress(doing="predicting", lower_bound_seconds=bound))
    search = _found(Search(tables, effort, report, bound))
    take_smaller(search)
    ranked = search.ranked
    if ranked.best is not None:
        best, runner_up = _improved(search, *proven_best(search, ranked), bound)
    elif search.interrupted:
        raise StoppedError("stopped before the first plan was found")
    else:
        best, runner_up = _last_resort(tables, asked), None
    rivals = Rivals()
    if compare and not search.interrupted:
        report(Progress(doing="comparing", best_seconds=best.step_seconds,
                        lower_bound_seconds=bound))  # fmt: skip
        rivals = _compared(search, best, bound)
        if rivals.faster is not None:
            best, runner_up = rivals.faster, best  # nothing uneven pays here
    best = search.simulator.prove_again(best)
    return SearchResult(
        best=best,
        value=search.worth(best),
        spending=spending_of(best.plan, best.step_seconds, problem.cluster),
        value_bound=value_bound(tables, _checked(bound, best)),
        lower_bound_seconds=_checked(bound, best),
        search_cpu_seconds=time.process_time() - started,
        objective=problem.objective,
        runner_up=runner_up,
        why_runner_up_lost=_why_lost(best, runner_up),
        uniform=rivals.uniform if isinstance(rivals.uniform, ProvenPlan) else None,
        uniform_missing=rivals.uniform if isinstance(rivals.uniform, str) else "",
        alone=rivals.alone,
        alone_missing=rivals.missing,
        pruned=_pruned(search, ranked),
        interrupted=search.interrupted,
        work={
            "priced": search.source.coarse.priced,
            "simulated": search.simulator.simulated,
            "instructions": search.simulator.instructions,
        },
    )


def _compared(search: Search, best: ProvenPlan, bound: float) -> Rivals:
    """Look for the best uniform plan and for each pool's own; an interrupt keeps what is there."""
    rivals = Rivals()
    tables, effort, problem = search.tables, search.effort, search.problem
    try:
        rivals.uniform = _uniform(tables, _exported(problem))
        if isinstance(rivals.uniform, ProvenPlan) and _pays(search, rivals.uniform, best):
            best = rivals.faster = rivals.uniform
        most = effort.local_search(problem.num_chips, best.step_seconds, bound)
        alone = _alone(tables, effort, best, most // THRESHOLDS.alone_share)
        rivals.alone, rivals.missing = alone
    except KeyboardInterrupt:
        search.interrupted = True
    return rivals


def _improved(
    search: Search, best: ProvenPlan, runner_up: ProvenPlan | None, bound: float
) -> tuple[ProvenPlan, ProvenPlan | None]:
    """Search on from the best plans of different shapes, then from the best of what was found."""
    budget = search.effort.local_search(search.problem.num_chips, best.step_seconds, bound)
    refundable = int(THRESHOLDS.refunded_share * budget)
    local = PlanSearch(search.simulator, search.seconds_worth, refundable)
    known = [(s.plan, s.estimate) for s in (best, runner_up) if s is not None]
    most = min(THRESHOLDS.most_starts, 1 + budget // THRESHOLDS.per_start)
    starts = _different_starts(search, known, most)
    reached = starts
    for keep, share in (
        (len(starts), THRESHOLDS.first_share),
        (2, THRESHOLDS.second_share),
        (1, 1.0),
    ):
        reached = sorted(reached, key=lambda pair: search.plan_worth(*pair))
        left = budget - local.spent
        ahead = [local.improved(*pair, int(share * left)) for pair in reached[:keep]]
        reached = ahead + reached[keep:]
    if search.effort.is_wide(best.step_seconds, bound):
        for index, start in enumerate(reached[1:], start=1):
            reached[index] = local.improved(*start, max(0, budget - local.spent))
        reached.sort(key=lambda pair: search.plan_worth(*pair))
        reached[0] = local.improved(*reached[0], int(search.effort.finish * budget))
    plan, reached_estimate = min(reached, key=lambda pair: search.plan_worth(*pair))
    if search.plan_worth(plan, reached_estimate) >= search.worth(best):
        return best, runner_up
    others = [pair for pair in reached if summary_of(pair[0]) != summary_of(plan)]
    second = min(others, key=lambda pair: search.plan_worth(*pair), default=None)
    if second is not None:
        runner_up = ProvenPlan(plan=second[0], estimate=second[1], summary=summary_of(second[0]))
    return search.simulator.prove(plan, reached_estimate, summary_of(plan)), runner_up


def _different_starts(
    search: Search,
    known: list[tuple[Plan, Estimate]],
    most: int,
) -> list[tuple[Plan, Estimate]]:
    """Return the best plan and the best ones of other shapes, for a local search to start from."""
    starts = sorted(known, key=lambda pair: search.plan_worth(*pair))[:1]
    shapes = {_shape_of(plan) for plan, _ in starts}
    limit = THRESHOLDS.starts_within * search.plan_worth(*starts[0])
    for other in search.ranked.drafts:
        if len(starts) >= most or other.value > limit:
            break
        plan = search.simulator.plan_of(other.draft)
        shape = _shape_of(plan)
        if shape not in shapes:
            shapes.add(shape)
            starts.append((plan, search.simulator.price(plan)))
    return starts


def _shape_of(plan: Plan) -> object:
    """Return what a local search hardly changes: which pools compute in how many stages."""
    return frozenset(
        tuple((stage.chips.pools, stage.num_replicas) for stage in pipeline.stages)
        for pipeline in plan.pipelines
    )


def _exported(problem: Problem) -> Callable[[Plan], bool] | None:
    """Return what tells whether a plan can be exported as was asked; None where it need not."""
    return (lambda plan: exports(plan, problem)) if problem.space.exportable else None


def _pays(search: Search, uniform: ProvenPlan, best: ProvenPlan) -> bool:
    """Tell whether a uniform plan of the space is better than what was found."""
    kept = plan_keeps(uniform.plan, search.tables.problem)
    return kept and search.worth(uniform) < search.worth(best)


def _found(search: Search) -> Search:
    """Run a search, exactly where the space is small, in parts where nothing was found."""
    ranked = search.run_exactly()
    if ranked is None or search.may_have_more:
        ranked = search.run()
    if ranked.best is None and not search.interrupted:
        return search_parts(search)
    return search


def _last_resort(tables: Tables, asked: Problem | None) -> ProvenPlan:
    """Return the best uniform plan, where it keeps to the space and nothing else was found."""
    problem = tables.problem
    uniform = _uniform(tables, lambda plan: plan_keeps(plan, problem))
    if isinstance(uniform, str):
        words = tables if asked is None else Tables(asked)
        raise explain_infeasible(words, _first_fit)
    return uniform


def _checked(bound: float, best: ProvenPlan) -> float:
    """Return the bound; one that a plan beats is no bound."""
    if bound > best.step_seconds * (1.0 + 1e-9):
        raise SearchDisagreementError(
            f"the plan takes {best.step_seconds:.6g} s, less than the bound of {bound:.6g} s"
        )
    return min(bound, best.step_seconds)


def _why_lost(best: ProvenPlan, runner_up: ProvenPlan | None) -> str:
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


def _recompute_share(estimate: Estimate) -> float:
    return (estimate.hfu - estimate.mfu) / estimate.hfu if estimate.hfu else 0.0


def _uniform(tables: Tables, wanted: Callable[[Plan], bool] | None = None) -> ProvenPlan | str:
    simulator = DraftSimulator(tables)
    uniform = best_uniform(tables, simulator, wanted, idle=tables.problem.space.idle)
    if isinstance(uniform, str):
        return uniform
    return simulator.prove(*uniform, summary_of(uniform[0]))


def plan_uniform(problem: Problem) -> ProvenPlan | str:
    """Return the best plan that treats all chips alike and leaves none idle, or why it is none."""
    every = replace(problem, space=replace(problem.space, idle=False))
    return _uniform(Tables(every))


def _alone(
    tables: Tables, effort: Effort, best: ProvenPlan, work: int
) -> tuple[dict[str, Alone], dict[str, str]]:
    """Search each pool by itself with its share of the batch (DESIGN §5).

    `work` is that of each local search, in instructions.
    """
    problem = tables.problem
    pools = problem.pools
    if len(pools) == 1:
        pool = pools[0]
        batch = problem.job.global_batch
        return {pool.name: Alone(pool=pool.name, global_batch=batch, proven=best)}, {}
    alone: dict[str, Alone] = {}
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
            ranked = search.run()
            if ranked.best is not None:
                proven, _ = proven_best(search, ranked)
                local = PlanSearch(search.simulator, search.seconds_worth)
                better = local.improved(proven.plan, proven.estimate, work)
                proven = search.simulator.prove(*better, summary_of(better[0]))
                alone[pool.name] = Alone(
                    pool=pool.name, global_batch=batch, proven=proven, fits=not unlimited
                )
                break
        else:
            missing[pool.name] = "no strategy of the space divides its chips and batch"
    return alone, missing


def _divisible(problem: Problem, pool: Pool, sequences: float) -> int:
    """Return a pool's batch, rounded up by 1/32 at most; with experts to what an island takes.

    A prime number of sequences has no equal replicas and shuts out every way to spread experts: it
    would flatter the mix.
    """
    step = 1 << max(0, math.floor(math.log2(max(1.0, sequences) / THRESHOLDS.alone_parts)))
    if problem.model.num_experts:
        step = math.lcm(step, pool.node.largest_island)
    return step * math.ceil(sequences / step - 1e-9)


def _pruned(search: Search, ranked: RankedDrafts) -> tuple[Pruned, ...]:
    source = search.source
    skipped, rejected = ranked.skipped + source.skipped, ranked.rejected + source.rejected
    pruned = [
        Pruned(
            what="coarse strategies",
            by="the time that the coarse model predicts",
            count=max(0, source.coarse.priced - search.simulator.simulated - skipped),
        )
    ]
    if skipped:
        pruned.append(
            Pruned(what="cut strategies", by="predicted time or work budget", count=skipped)
        )
    if rejected:
        by = "memory, after the exact cut"
        pruned.append(Pruned(what="strategies", by=by, count=rejected))
    return tuple(pruned)


def _first_fit(problem: Problem) -> ProvenPlan | None:
    """Return a plan that fits, with little effort; None where none was found."""
    few = Effort(candidates=3, chains=2, polished=0)
    tables, counts = Tables(problem), problem.sequence_counts()
    spaces = [problem.space]
    if len(counts) > 1 and not problem.unlimited_memory:
        spaces.append(replace(problem.space, sequences=counts[:1]))
    for space in spaces:
        search = Search(tables.for_problem(replace(problem, space=space)), few)
        ranked = search.run()
        if ranked.best is not None:
            return proven_best(search, ranked)[0]
    return None
