"""Lanes, slots and chunk of an engine whose layers are laid out, and its rate in the long run.

Several are tried. More lanes than stages hide the ways between them, and what one lane's steps wait
for another's; fewer have more rows each, for which a layer's weights are read once.
"""

from __future__ import annotations

import functools
import itertools
import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from tutti.cost.arrays import FloatArray
from tutti.cost.serving.stage_prices import STREAM_BYTES
from tutti.cost.serving.transfers import TransferWire, wire_between
from tutti.hardware.topology import Position
from tutti.plan.serving import PAGE_SIZE, Role
from tutti.search.serving.chains import Chain
from tutti.search.serving.kinds import BATCHES, ChipGroup, prompt_tokens
from tutti.search.serving.long_run import Held, steps_of
from tutti.search.serving.question import ServeProblem

HEADROOM = 1.25  # slots for more sequences than there are on average: nobody waits for one
PROMPTS = 16  # at a time on a lane of a prefill engine
SPREAD = 0.85  # of the limit per token, on average: some sequences meet more prompts than others
KEEPS_UP = 1.15  # of the prompts' tokens that come, where a limit asks that queues empty again
HURRIES = 3.0  # a mean prompt's chunks, one step after the other, of the limit on the first token
_LANES = (1.0, 1.25, 1.5, 2.0)  # of the stages
_CHUNKS = np.array([64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096])
_AS_GOOD = 0.99  # of the best rate: shorter turns are better then


class EngineSize(NamedTuple):
    """How an engine works, and what it serves so."""

    lanes: int
    slots: int  # all lanes
    chunk: int  # tokens of a step
    rate: float  # requests per second
    ideal: float  # if no lane waited for another
    per_token_s: float


def per_token_limit(problem: ServeProblem) -> float | None:
    """Return what a token may take on average for most requests to keep their limit."""
    limit = problem.service.limits.per_token_s
    return None if limit is None else SPREAD * limit


def most_slots(problem: ServeProblem, stages: int) -> int:
    """Return how many sequences an engine may have at a time, each stage at least one."""
    return max(stages, problem.space.most_slots * (4 if stages > 1 else 1))


def size_of(
    problem: ServeProblem,
    chain: Chain,
    layers: tuple[int, ...],
    pages: int,
    batch: int,
    role: Role,
) -> EngineSize | None:
    """Return the best size for about so many rows a step; None if none keeps the limits."""
    if role is Role.PREFILL:
        return _prefill_size(problem, chain, layers, pages)
    if role is Role.DECODE:
        return _decode_size(problem, chain, layers, pages, batch)
    return _both_size(problem, chain, layers, pages, batch)


# --- prompts and answers ---------------------------------------------------------------------


def _both_size(
    problem: ServeProblem, chain: Chain, layers: tuple[int, ...], pages: int, batch: int
) -> EngineSize | None:
    limits, traffic = problem.service.limits, problem.service.traffic
    limited = limits.first_token_s is not None or limits.per_token_s is not None
    lanes, chunks = _tried(problem, len(chain), batch, limited)
    held = pages // lanes * PAGE_SIZE
    most = np.full(len(lanes), float(batch)) if limited else most_slots(problem, len(chain)) / lanes
    stages = list(zip(chain, layers, strict=True))
    steps = steps_of(
        problem, stages, chain_wires(problem, chain), lanes, held.astype(np.float64), chunks, most
    )
    rate = steps.per_s * steps.rows / traffic.output.expected
    fits = held >= problem.longest
    if limits.per_token_s is not None:
        fits &= steps.turn_s <= SPREAD * limits.per_token_s
    if limited and len(chain) > 1:
        fits &= KEEPS_UP * prompt_tokens(problem, 1.0) * steps.rows <= chunks - steps.rows
    if limits.first_token_s is not None:
        hurried = HURRIES * traffic.prompt.expected * steps.turn_s / limits.first_token_s
        fits &= (chunks - steps.rows >= hurried) | (chunks >= chunks.max())
        alone = _long_prompt(problem) * _prompt_seconds(chain, layers)
        fits &= alone + steps.turn_s < limits.first_token_s
    if not fits.any():
        return None
    good = fits & (rate >= _AS_GOOD * np.where(fits, rate, 0.0).max())
    best = int(np.argmin(np.where(good, steps.turn_s, np.inf)))
    each = math.ceil(HEADROOM * (batch if limited else float(steps.rows[best])))
    ideal = float(steps.ideal[best] * steps.rows[best]) / traffic.output.expected
    return EngineSize(
        int(lanes[best]), int(lanes[best]) * each, int(chunks[best]), float(rate[best]),
        ideal, float(steps.turn_s[best]),
    )  # fmt: skip


def _tried(
    problem: ServeProblem, stages: int, batch: int, limited: bool
) -> tuple[FloatArray, FloatArray]:
    """Return lanes and chunks, every one with every other."""
    largest = problem.space.chunk
    chunks = _CHUNKS[max(largest, _CHUNKS[0]) >= _CHUNKS].astype(np.float64)
    if stages == 1 and limited:
        limit, wanted = problem.service.limits.per_token_s, 1.5 * prompt_tokens(problem, batch)
        first = problem.service.limits.first_token_s
        if first is not None and limit is not None:
            prompt = problem.service.traffic.prompt.expected
            wanted = max(wanted, HURRIES * prompt * SPREAD * limit / first)
        chunks = np.array([batch + max(64.0, 64.0 * math.ceil(min(wanted, largest) / 64.0))])
    lanes = np.unique(np.ceil(np.array(_LANES) * stages)) if stages > 1 else np.ones(1)
    grid = np.meshgrid(lanes, chunks)
    return grid[0].ravel(), grid[1].ravel()


def chain_wires(problem: ServeProblem, chain: Chain) -> tuple[float, float]:
    """Return the latencies of the ways between stages and back, and their seconds per token."""
    latency = each = 0.0
    for before, after in itertools.pairwise(chain):
        wire = _wire(problem, before, after)
        latency += wire.latency_s
        each += wire.byte_s
    if len(chain) > 1:  # what was sampled goes back to the first stage
        latency += _wire(problem, chain[0], chain[1]).latency_s
    return latency, each * problem.model.hidden * STREAM_BYTES


@functools.lru_cache(maxsize=512)
def _wire(problem: ServeProblem, before: ChipGroup, after: ChipGroup) -> TransferWire:
    pool = problem.cluster.pool(before.pool)
    first, second = Position(before.pool, 0, 0), Position(after.pool, 0, 0)
    if before.pool == after.pool:
        inside = pool.nodes == 1 or pool.node.num_chips >= 2 * before.tp
        second = Position(after.pool, 0 if inside else 1, before.tp if inside else 0)
    return wire_between(problem.cluster, first, second)


# --- one of the two --------------------------------------------------------------------------


def _decode_size(
    problem: ServeProblem, chain: Chain, layers: tuple[int, ...], pages: int, batch: int
) -> EngineSize | None:
    lanes, traffic = len(chain), problem.service.traffic
    held = Held.of(traffic)
    room = pages // lanes * PAGE_SIZE
    rows = min(float(batch), (room - held.spare) / held.decode)
    if rows <= 0.0 or room < problem.longest:
        return None
    times = [
        n * float(np.interp(rows, BATCHES, kind.decode_s))
        for n, kind in zip(layers, chain, strict=True)
    ]
    times[-1] += float(np.interp(rows, BATCHES, chain[-1].head_s))
    if lanes == 1:
        times[0] += chain[0].host_s
    wires = chain_wires(problem, chain)
    turn = max(lanes * max(times), sum(times) + wires[0] + wires[1] * rows)
    if turn > (per_token_limit(problem) or math.inf):
        return None
    output = traffic.output.expected
    return EngineSize(
        lanes, lanes * math.ceil(HEADROOM * batch), max(problem.space.chunk, batch),
        lanes * rows / (output * turn), rows / (output * max(times)), turn,
    )  # fmt: skip


def _prefill_size(
    problem: ServeProblem, chain: Chain, layers: tuple[int, ...], pages: int
) -> EngineSize | None:
    lanes, limit = len(chain), problem.service.limits.first_token_s
    times = [n * kind.prefill_s for n, kind in zip(layers, chain, strict=True)]
    times[-1] += float(chain[-1].head_s[0])
    rate = ideal = 1.0 / max(times)
    if limit is not None:
        first = _long_prompt(problem) * _prompt_seconds(chain, layers)
        if first >= limit:
            return None
        rate *= _unhurried(first, limit)
    held = pages // lanes * PAGE_SIZE // problem.longest
    if held < 1:
        return None
    slots = lanes * min(PROMPTS, held)  # prompts that wait share steps, as far as pages reach
    return EngineSize(lanes, slots, problem.space.chunk, rate, ideal, 0.0)


def _prompt_seconds(chain: Chain, layers: tuple[int, ...]) -> float:
    return sum(n * kind.prefill_s for n, kind in zip(layers, chain, strict=True))


def _long_prompt(problem: ServeProblem) -> float:
    """Return how many times longer than the mean all but the last prompts are."""
    traffic, share = problem.service.traffic, problem.service.limits.share
    prompt, normal = traffic.prompt, NormalDist().inv_cdf(min(share, 0.999))
    longer = math.exp(max(0.0, normal * prompt.sigma - prompt.sigma**2 / 2))
    return min(longer, prompt.longest / prompt.expected)


def _unhurried(first: float, limit: float) -> float:
    """Return how busy a prefill engine may be for its queue to leave most within the limit.

    Of a queue with even service, waiting is ρ ÷ (2 (1 - ρ)) services on average, and 2.3 times
    that for nine of ten.
    """
    services = (limit - first) / (2.3 / 2.0 * first)
    return services / (1.0 + services)
