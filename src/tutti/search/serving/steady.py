"""What an engine serves in the long run, by simulation of it alone: closed forms only choose it.

Without limits somebody always waits. With limits, requests come at random, less so where several
equal engines take turns; the rate is the largest at which as many as wanted keep them.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from tutti.cost.serving.step_load import windows_of
from tutti.plan.serving import Lengths, Limits, Role
from tutti.search.serving.build_plan import plan_of_one
from tutti.search.serving.kept_rate import largest_kept
from tutti.search.serving.options import EngineOption
from tutti.search.serving.question import ServeProblem
from tutti.simulate.serving.requests import Requests, arrival_times
from tutti.simulate.serving.run import Deployment, simulate_serving

TURNS = 6.0  # how often every slot is filled
QUEUED_TURNS = 12.0  # where somebody always waits: what all began with is felt for long
FILLING = 0.35  # of those that end, before as many prompts come as there are answers
FEWEST, MOST_STEPS = 1500, 20_000  # requests, and steps as far as that allows
MOST_QUEUED_STEPS = 50_000
DECODED = 0.2  # of those that may miss a limit, on a logarithmic scale: for decodes
CLOSE = 1.015  # a rate that is kept, and the next that is not
KEEPS_UP = 0.97  # of the requests that come so many end meanwhile
_MOST_TURNS = 64  # equal engines that take turns: more hardly differ


def is_quick(problem: ServeProblem) -> bool:
    """Tell whether the compiled loop simulates engines: then each is asked what it serves."""
    known = problem.measured or {}
    return (
        not problem.service.traffic.shared_prefix
        and windows_of(problem.model) == (None,)
        and not any(chip.serves for name, chip in known.items() if name in problem.pools)
    )


def steady_rate(problem: ServeProblem, option: EngineOption, *, copies: int, guess: float) -> float:
    """Return the requests per second that one of so many equal engines serves; 0: none in time."""
    deployment = Deployment.of(plan_of_one(problem, option), problem.measured)
    limits = limits_of(problem, option.role)
    if limits == Limits(share=limits.share):
        return _most_served(problem, option, deployment)
    lengths = _drawn_lengths(problem, _count(problem, option, TURNS, MOST_STEPS))

    def keeps(rate: float) -> bool:
        times = _times(problem, len(lengths[0]), rate, copies)
        result = simulate_serving(deployment, _requests(problem, times, lengths))
        within = replace(result, limits=limits).keeps_limits
        return within and result.request_rate >= KEEPS_UP * rate

    return largest_kept(keeps, guess, close=CLOSE)


def _most_served(problem: ServeProblem, option: EngineOption, deployment: Deployment) -> float:
    """Return what is served while somebody always waits."""
    prompts, outputs = _drawn_lengths(
        problem, _count(problem, option, QUEUED_TURNS, MOST_QUEUED_STEPS)
    )
    result = simulate_serving(
        deployment, _requests(problem, np.zeros(len(prompts)), (prompts, outputs))
    )
    order = np.argsort(result.whole_s)
    last = min(math.ceil(1.2 * option.slots), len(order) // 3)  # slots are no longer filled
    begin, end = int(FILLING * len(order)), len(order) - last
    span = float(result.whole_s[order[end]] - result.whole_s[order[begin]])
    ended = order[begin:end]
    if span <= 0.0:
        return option.rate
    if option.role is Role.PREFILL:
        return len(ended) / span
    return float(outputs[ended].sum()) / span / problem.service.traffic.output.expected


def limits_of(problem: ServeProblem, role: Role) -> Limits:
    """Return the limits that an engine of a role can miss, and how many may.

    Steps with a few more decodes make nearly all answers too slow; the more prompts come, the more
    of them wait. So nearly all that may miss a limit are left to prompts.
    """
    limits = problem.service.limits
    decoded = limits.share**DECODED
    if role is Role.PREFILL:
        return replace(limits, per_token_s=None, share=limits.share / decoded)
    if role is Role.DECODE:
        return replace(limits, first_token_s=None, share=decoded)
    return limits


def _count(problem: ServeProblem, option: EngineOption, turns: float, most_steps: int) -> int:
    """Return how many requests fill every slot some times, and take not too many steps."""
    rows = max(1.0, 0.7 * option.slots / option.lanes)
    each = 1.0 if option.role is Role.PREFILL else problem.service.traffic.output.expected / rows
    wanted = max(float(FEWEST), turns * option.slots)
    return int(max(300.0, min(wanted, most_steps / each)))


def _times(problem: ServeProblem, count: int, rate: float, copies: int) -> NDArray[np.float64]:
    """Return when requests come to one of several engines that take turns."""
    traffic, turns = problem.service.traffic, min(max(1, copies), _MOST_TURNS)
    random = np.random.default_rng(11)
    times = arrival_times(traffic.arrivals, count * turns, rate * turns, traffic.burst, random)
    return times[::turns]


def _requests(
    problem: ServeProblem,
    times: NDArray[np.float64],
    lengths: tuple[NDArray[np.int64], NDArray[np.int64]],
) -> Requests:
    return Requests(
        times=times, prompts=lengths[0], outputs=lengths[1],
        shared_prefix=problem.service.traffic.shared_prefix,
    )  # fmt: skip


def _drawn_lengths(
    problem: ServeProblem, count: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return lengths whose distribution is the traffic's as exactly as their number allows."""
    random, traffic = np.random.default_rng(7), problem.service.traffic
    return _spread(traffic.prompt, count, random), _spread(traffic.output, count, random)


def _spread(lengths: Lengths, count: int, random: np.random.Generator) -> NDArray[np.int64]:
    places = (random.permutation(count) + 0.5) / count
    logs = math.log(lengths.mean) - lengths.sigma**2 / 2 + lengths.sigma * ndtri(places)
    tokens: NDArray[np.int64] = np.clip(np.round(np.exp(logs)), 1, lengths.longest).astype(np.int64)
    return tokens
