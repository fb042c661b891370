"""Plans a deployment: engines that fit, a mixture of them, the best few simulated.

Beside the mixture stand what people do without a planner: no separated roles, each pool by itself,
one pipeline of all chips of a kind, an even split of the requests. All become candidates, so that
the answer is never worse than one of them by simulation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tutti.errors import InputError
from tutti.plan.check import require_valid
from tutti.plan.plan import Plan
from tutti.plan.serving import Role
from tutti.search.serving.build_plan import build_plan
from tutti.search.serving.evaluate import (
    MOST_OF_PROMISE,
    Evaluated,
    confirm,
    evaluate,
    simulate_at,
)
from tutti.search.serving.flows import Mixture
from tutti.search.serving.infeasible import why_nothing_fits
from tutti.search.serving.kinds import ChipGroup, kinds_of
from tutti.search.serving.options import EngineOption, best_engine, engine_options
from tutti.search.serving.question import ServeProblem
from tutti.search.serving.rated import RatedEngines

ALL_ROLES = (Role.BOTH, Role.PREFILL, Role.DECODE)
MARGIN = (1.1, 1.25, 1.45, 1.7)  # of the demand, until the simulation keeps the limits


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedDeployment:
    """One way to deploy: what it promises, and what the simulator says where it was asked."""

    name: str
    promised: float  # requests per second, never waiting
    simulated: float | None
    chips: int
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServeAnswer:
    """The deployment, what it serves, and what else was looked at."""

    problem: ServeProblem
    best: Evaluated
    winner: str
    compared: tuple[ComparedDeployment, ...]
    bound: float  # requests per second of any deployment of the engines that were priced
    num_engines: int  # that were priced
    seconds: float

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.best.plan

    @property
    def gap(self) -> float:
        """What the bound leaves, as a share of it."""
        return 1.0 - self.best.rate / self.bound if self.bound > 0 else 0.0


def plan_serving(
    problem: ServeProblem, report: Callable[[str], None] = lambda _: None
) -> ServeAnswer:
    """Return the best deployment, or raise an InputError that says what stands in the way."""
    began = time.perf_counter()
    kinds = kinds_of(problem)
    roles = ALL_ROLES if problem.space.separate else (Role.BOTH,)
    report("engines")
    options = engine_options(problem, kinds, roles)
    if not options:
        raise InputError(why_nothing_fits(problem, kinds))
    report("mixtures")
    engines = RatedEngines(problem, options)
    if problem.objective == "rate":
        answer = _most(problem, kinds, engines, report)
    else:
        answer = _least(problem, engines, report)
    require_valid(answer.plan)
    return replace(answer, num_engines=len(options), seconds=time.perf_counter() - began)


# --- most requests ---------------------------------------------------------------------------


def _most(
    problem: ServeProblem,
    kinds: Sequence[ChipGroup],
    engines: RatedEngines,
    report: Callable[[str], None],
) -> ServeAnswer:
    candidates = _candidates(problem, kinds, engines)
    bound = max(mixture.bound for _, mixture in candidates)
    evaluated: dict[object, tuple[str, Evaluated]] = {}  # by what mixtures share
    confirmed: set[object] = set()
    best, key = 0.0, None
    while True:  # what was left out may win after all when the best turns out worse in the long run
        more = _simulated(problem, candidates, evaluated, best, bound, report)
        if not more and key is not None:
            break
        key = _confirmed(problem, evaluated, confirmed, report)
        best = evaluated[key][1].rate
    winner, chosen = evaluated[key]
    compared = []
    for name, mixture in sorted(candidates, key=lambda item: -item[1].rate):
        known = evaluated.get(_same(mixture))
        rate = known[1].rate if known is not None and known[1].rate > 0.0 else None
        compared.append(
            ComparedDeployment(
                name=name, promised=mixture.rate, simulated=rate, chips=mixture.num_chips
            )
        )
    compared += _even_split(chosen)
    return ServeAnswer(
        problem=problem, best=chosen, winner=winner, compared=tuple(compared), bound=bound,
        num_engines=0, seconds=0.0,
    )  # fmt: skip


def _simulated(
    problem: ServeProblem,
    candidates: Sequence[tuple[str, Mixture]],
    evaluated: dict[object, tuple[str, Evaluated]],
    best: float,
    bound: float,
    report: Callable[[str], None],
) -> bool:
    """Simulate those that can win and have not been; tell whether there were any."""
    before = len(evaluated)
    for name, mixture in sorted(candidates, key=lambda item: -item[1].rate):
        most = min(bound, MOST_OF_PROMISE * mixture.rate)
        if _same(mixture) not in evaluated and most > best:
            report(f"simulating: {name}")
            plan = build_plan(problem, mixture)
            own = evaluate(problem, plan, mixture.rate, least=best, most=bound)
            evaluated[_same(mixture)] = (name, own)
            best = max(best, own.rate)
    return len(evaluated) > before


def _confirmed(
    problem: ServeProblem,
    evaluated: dict[object, tuple[str, Evaluated]],
    confirmed: set[object],
    report: Callable[[str], None],
) -> object:
    """Confirm deployments, the best first, until none of the others is better; return its key.

    Those that were confirmed have the rate of the long run then.
    """
    while True:
        key = max(evaluated, key=lambda each: evaluated[each][1].rate)
        if key in confirmed:
            return key
        name, own = evaluated[key]
        report(f"confirming: {name}")
        evaluated[key] = (name, confirm(problem, own))
        confirmed.add(key)


def _same(mixture: Mixture) -> object:
    """Return what mixtures of the same engines share."""
    flows = tuple((pair, round(rate, 6)) for pair, rate in sorted(mixture.flows.items()))
    kinds = sorted((o.role.value, o.name, o.layers, o.slots, n) for o, n in mixture.engines)
    return tuple(kinds), flows


def _candidates(
    problem: ServeProblem, kinds: Sequence[ChipGroup], engines: RatedEngines
) -> list[tuple[str, Mixture]]:
    """Return the mixtures to compare, by name."""
    candidates = []
    every = engines.solve()
    if every is None or every.rate <= 0.0:
        raise InputError(why_nothing_fits(problem, kinds))
    both = engines.solve(lambda option: option.role is Role.BOTH)
    alone = _pools_alone(problem, engines)
    candidates.append(("planned", every))
    if both is not None:
        candidates.append(("no separation", both))
    if alone is not None:
        candidates.append(("each pool alone", alone))
    chain = _one_pipeline_per_pool(problem, kinds, engines)
    if chain is not None:
        candidates.append(("one pipeline per kind of chip", chain))
    return candidates


def _pools_alone(problem: ServeProblem, engines: RatedEngines) -> Mixture | None:
    """Return the best of every pool by itself, side by side."""

    def of(pool: str) -> Callable[[EngineOption], bool]:
        return lambda option: option.role is Role.BOTH and set(option.chips) == {pool}

    parts = [engines.solve(of(pool)) for pool in problem.pools]
    return _joined([part for part in parts if part is not None])


def _joined(parts: Sequence[Mixture]) -> Mixture | None:
    if not parts:
        return None
    return Mixture(
        engines=tuple(engine for part in parts for engine in part.engines),
        flows={},
        rate=sum(part.rate for part in parts),
        bound=sum(part.bound for part in parts),
    )


def _one_pipeline_per_pool(
    problem: ServeProblem, kinds: Sequence[ChipGroup], engines: RatedEngines
) -> Mixture | None:
    """Return a pipeline through all chips of each pool: what is done without a planner."""
    pipelines = []
    for pool in problem.pools:
        widest = max((kind for kind in kinds if kind.pool == pool), key=lambda kind: kind.tp)
        stages = min(widest.groups, problem.model.num_layers)
        option = best_engine(problem, (widest,) * stages, Role.BOTH)
        option = option and engines.rate(option)
        if option is not None and option.rate > 0.0:
            pipelines.append((option, 1))
    if not pipelines:
        return None
    rate = sum(option.rate for option, _ in pipelines)
    return Mixture(engines=tuple(pipelines), flows={}, rate=rate, bound=0.0)


def _even_split(best: Evaluated) -> list[ComparedDeployment]:
    """Return the same engines with as many requests for each, whatever its speed."""
    entries = [
        pipeline
        for pipeline in best.plan.pipelines
        if pipeline.engine is not None and pipeline.engine.role is not Role.DECODE
    ]
    if len(entries) < 2:
        return []
    total = sum(pipeline.copies for pipeline in entries)
    slowest = min(
        (pipeline.engine.share / pipeline.copies if pipeline.engine is not None else 1.0)
        for pipeline in entries
    )
    # the slowest engine is full when all get what it takes
    promised = best.promised * slowest * total
    return [
        ComparedDeployment(
            name="even split over the same engines", promised=promised, simulated=None,
            chips=best.plan.num_ranks,
        )
    ]  # fmt: skip


# --- least cost or chips ---------------------------------------------------------------------


def _least(
    problem: ServeProblem, engines: RatedEngines, report: Callable[[str], None]
) -> ServeAnswer:
    demand = problem.service.traffic.requests_per_s
    if demand is None:
        raise InputError(f"--objective {problem.objective}: the workload must say requests_per_s")
    if problem.objective == "cost" and any(
        problem.cluster.pool(name).price_per_chip_hour is None for name in problem.pools
    ):
        raise InputError("--objective cost: every pool needs 'price_per_chip_hour'")
    compared = []
    for margin in MARGIN:
        mixture = engines.solve(objective=problem.objective, demand=margin * demand)
        if mixture is None:
            break
        report(f"simulating: {mixture.num_chips} chips")
        plan = build_plan(problem, mixture)
        result = simulate_at(problem, plan, demand)
        kept = demand if result.keeps_limits else demand * result.within
        compared.append(
            ComparedDeployment(
                name=f"for {margin:g} × the demand", promised=mixture.rate, simulated=kept,
                chips=mixture.num_chips, note=_priced(problem, mixture),
            )
        )  # fmt: skip
        if result.keeps_limits:
            cheapest = Evaluated(plan=plan, promised=mixture.rate, rate=demand, result=result)
            return ServeAnswer(
                problem=problem, best=cheapest, winner=compared[-1].name, compared=tuple(compared),
                bound=mixture.bound, num_engines=0, seconds=0.0,
            )  # fmt: skip
    most = _most(replace(problem, objective="rate"), kinds_of(problem), engines, report)
    raise InputError(
        f"no deployment keeps the limits at {demand:g} requests/s; the most that these chips "
        f"serve within them is {most.best.rate:.4g} requests/s ({most.plan.num_ranks} chips)"
    )


def _priced(problem: ServeProblem, mixture: Mixture) -> str:
    if not mixture.price:
        return ""
    return f"{mixture.price:.2f} {problem.cluster.currency} per hour"
