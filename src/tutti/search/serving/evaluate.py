"""What a deployment really serves: the largest rate at which it keeps the limits, simulated."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tutti.plan.plan import Plan
from tutti.plan.serving import Role
from tutti.search.serving.question import ServeProblem
from tutti.simulate.serving.requests import Requests, draw
from tutti.simulate.serving.result import ServingResult
from tutti.simulate.serving.run import Deployment, simulate_serving

MOST_OF_PROMISE = 1.3
# shares of the rate that the flows promise; the first that keeps the limits counts
LADDER = (
    MOST_OF_PROMISE, 1.15, 1.0, 0.95, 0.9, 0.85, 0.8, 0.74, 0.68, 0.6, 0.5, 0.4, 0.28, 0.16, 0.08,
)  # fmt: skip
FEWEST = 200  # requests of a simulation
TURNS = 2.0  # how often every slot is filled in it, as far as steps reach
MOST_STEPS = 5_000
# of the requests that come so many must end meanwhile, or the queue grows; not all, for slots
# are still filling in a run of few turns
KEEPS_UP = 0.85
# the same of the run that confirms the best: slots are full for most of it
LONG_TURNS, LONG_STEPS, KEEPS_UP_LONG = 6.0, 20_000, 0.95
LESS, HALF = 0.95, 0.5  # of a rate that was not kept: what is tried next, at most and at least
MOST_CONFIRMED = 10


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
        count = _count(problem, deployment, turns=LONG_TURNS, most_steps=LONG_STEPS)
        result = simulate_serving(deployment, _requests(problem, count, None, seed))
        return Evaluated(plan=plan, promised=promised, rate=result.request_rate, result=result)
    count = _count(problem, deployment)
    low = next(i for i, share in enumerate(LADDER) if share * promised <= most or share <= 1.0)
    high = len(LADDER)  # the first that keeps them lies in low…high
    kept: tuple[float, ServingResult] | None = None
    last: ServingResult | None = None
    place = low if low > 1 else 3  # a promise as high as the bound is likely to be kept
    while low < high:
        rate = LADDER[place] * promised
        result = simulate_serving(deployment, _requests(problem, count, rate, seed))
        last = result
        if result.keeps_limits and result.request_rate >= KEEPS_UP * rate:
            kept = (rate, result)
            high = place
        else:
            low = place + 1
            if low < len(LADDER) and LADDER[low] * promised < least and kept is None:
                break
        place = (low + high) // 2
    if kept is None:
        assert last is not None
        return Evaluated(plan=plan, promised=promised, rate=0.0, result=last)
    return Evaluated(plan=plan, promised=promised, rate=kept[0], result=kept[1])


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
    for _ in range(MOST_CONFIRMED):
        if rate <= 0.0:
            break
        result = simulate_serving(deployment, _requests(problem, count, rate, seed))
        kept = result.request_rate / rate
        if result.keeps_limits and kept >= KEEPS_UP_LONG:
            return replace(deployed, rate=rate, result=result)
        rate *= min(LESS, max(HALF, kept))
    return replace(deployed, rate=0.0, result=result)
