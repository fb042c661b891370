"""What a deployment really serves: the largest rate at which it keeps the limits, simulated."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tutti.plan.plan import Plan
from tutti.plan.serving import Role
from tutti.search.serving.kept_rate import largest_kept
from tutti.search.serving.question import ServeProblem
from tutti.search.serving.steady import CLOSE, is_quick
from tutti.simulate.serving.requests import Requests, draw
from tutti.simulate.serving.result import ServingResult
from tutti.simulate.serving.run import Deployment, simulate_serving

MOST_OF_PROMISE = 1.3
FEWEST = 200  # requests of a simulation
TURNS = 2.0  # how often every slot is filled in it, as far as steps reach
MOST_STEPS = 5_000
# of the requests that come so many must end meanwhile, or the queue grows; not all, for slots
# are still filling in a run of few turns
KEEPS_UP = 0.85
# the same of the run that confirms the best: slots are full for most of it
LONG_TURNS, LONG_STEPS, KEEPS_UP_LONG = 6.0, 20_000, 0.95
LONGEST = 24.0, 60_000  # turns and steps where all come at once, and steps are quick
# of a rate that was not kept: what is tried next, at most and at least
LESS, HALF = 0.95, 0.5
MOST_CONFIRMED = 10
COARSE = 1.06  # a rate that is kept and the next that is not, where simulations are slow


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evaluated:
    """A deployment and what it serves by simulation."""

    plan: Plan
    promised: float  # requests per second, by flows
    rate: float  # within the limits, by simulation; 0: at no rate
    result: ServingResult


def evaluate(
    problem: ServeProblem,
    plan: Plan,
    promised: float,
    *,
    least: float = 0.0,
    most: float = math.inf,
    seed: int = 0,
) -> Evaluated:
    """Return the largest rate within the limits, up to `most`.

    One that cannot beat `least` is left early.
    """
    deployment = Deployment.of(plan, problem.measured)
    if not _limited(problem):  # all come at once: a run that slots are still filling in says little
        turns, most_steps = LONGEST if is_quick(problem) else (LONG_TURNS, LONG_STEPS)
        count = _count(problem, deployment, turns=turns, most_steps=most_steps)
        result = simulate_serving(deployment, _requests(problem, count, None, seed))
        return Evaluated(plan=plan, promised=promised, rate=result.request_rate, result=result)
    quick = is_quick(problem)
    turns, most_steps = (LONG_TURNS, LONG_STEPS) if quick else (TURNS, MOST_STEPS)
    count = _count(problem, deployment, turns=turns, most_steps=most_steps)
    keeps_up = KEEPS_UP_LONG if quick else KEEPS_UP
    results: dict[float, ServingResult] = {}

    def keeps(rate: float) -> bool:
        result = results[rate] = simulate_serving(deployment, _requests(problem, count, rate, seed))
        return result.keeps_limits and result.request_rate >= keeps_up * rate

    most = min(most, MOST_OF_PROMISE * promised)
    close = CLOSE if quick else COARSE
    rate = largest_kept(keeps, promised, close=close, least=least, most=most)
    result = results[rate] if rate else list(results.values())[-1]
    return Evaluated(plan=plan, promised=promised, rate=rate, result=result)


def _limited(problem: ServeProblem) -> bool:
    limits = problem.service.limits
    return limits.first_token_s is not None or limits.per_token_s is not None


def _count(
    problem: ServeProblem,
    deployment: Deployment,
    *,
    turns: float = TURNS,
    most_steps: int = MOST_STEPS,
) -> int:
    """Return how many requests fill every slot some times, and take not too many steps."""
    pipelines, output = deployment.plan.pipelines, problem.service.traffic.output.expected
    wanted, steps = float(FEWEST), 0.0
    every = zip(pipelines, shares(deployment.plan), deployment.simulated(), strict=True)
    for pipeline, share, shown in every:
        if share > 0.02:  # who gets less hardly matters
            wanted = max(wanted, turns * pipeline.sequences / share)
        rows = 0.7 * pipeline.slots / pipeline.micro_batches
        prefill = pipeline.engine is not None and pipeline.engine.role is Role.PREFILL
        made = 1.0 if prefill else output / rows
        steps += share * shown / pipeline.copies * made  # per request
    return int(max(FEWEST, min(wanted, most_steps / max(steps, 1e-9))))


def shares(plan: Plan) -> list[float]:
    """Return the share of all requests that comes to each pipeline, over routes too."""
    shares = [p.engine.share if p.engine is not None else 0.0 for p in plan.pipelines]
    for route in plan.routes:
        shares[route.decode] += shares[route.prefill] * route.share
    return shares


def _requests(problem: ServeProblem, count: int, rate: float | None, seed: int) -> Requests:
    return draw(replace(problem.service.traffic, requests_per_s=rate), count, seed)


def simulate_at(problem: ServeProblem, plan: Plan, rate: float, seed: int = 0) -> ServingResult:
    """Return what requests see at a rate."""
    deployment = Deployment.of(plan, problem.measured)
    count = _count(problem, deployment)
    return simulate_serving(deployment, _requests(problem, count, rate, seed))


def confirm(problem: ServeProblem, deployed: Evaluated, *, seed: int = 1) -> Evaluated:
    """Return a deployment with the rate that it keeps in the long run, on other requests.

    In the short runs that choose among many, slots are still filling: a queue that grows slowly
    does not show.
    """
    if not _limited(problem):  # it was a long run already
        return deployed
    deployment = Deployment.of(deployed.plan, problem.measured)
    count = _count(problem, deployment, turns=LONG_TURNS, most_steps=LONG_STEPS)
    rate, result = deployed.rate, deployed.result
    less = 1.0 / CLOSE if is_quick(problem) else LESS
    for _ in range(MOST_CONFIRMED):
        if rate <= 0.0:
            break
        result = simulate_serving(deployment, _requests(problem, count, rate, seed))
        kept = result.request_rate / rate
        if result.keeps_limits and kept >= KEEPS_UP_LONG:
            return replace(deployed, rate=rate, result=result)
        rate *= min(less, max(HALF, kept))
    return replace(deployed, rate=0.0, result=result)
