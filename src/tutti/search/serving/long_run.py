"""What an engine does in the long run, when there is always somebody who waits.

Of one lane, in the mean over time: who decodes and who has a prompt computed hold its pages,

    rows (answer's context + 3/2 page) + prompts under way × their length + 1/2 prompt = tokens held

(a page is half empty, one more is kept free for each, and the next in line finds too few). With
every step `rows / output` requests end and as many prompts come: whole ones where the chunk has
room for them, else in pieces, in at most every step. The steps of several lanes follow each other
through the stages as on a road of one lane: behind a step with a chunk all others wait, so that a
turn takes as long as such a step does, unless the busiest stage has more to do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from tutti.cost.arrays import FloatArray
from tutti.plan.serving import PAGE_SIZE, Traffic
from tutti.search.serving.kinds import BATCHES, STEP_TOKENS, ChipGroup
from tutti.search.serving.question import ServeProblem

_HALVINGS = 30
_NORMAL = NormalDist()


class Held(NamedTuple):
    """What requests hold of a lane's pages, in tokens."""

    decode: float  # a sequence that decodes, its page that is kept free included
    prompt: float  # one whose prompt is under way
    spare: float  # free, and too little for the next in line
    common: float  # what all prompts begin with

    @classmethod
    def of(cls, traffic: Traffic) -> Held:
        """Return it for requests of a kind; long ones are there for longer."""
        own = own_prompt(traffic)
        lasting = traffic.prompt.lasting - (traffic.prompt.expected - own)
        return cls(
            own + traffic.output.lasting / 2.0 + 1.5 * PAGE_SIZE,
            max(lasting, 1.0) + PAGE_SIZE,
            own / 2.0,
            float(min(traffic.shared_prefix, traffic.prompt.longest)),
        )


def own_prompt(traffic: Traffic) -> float:
    """Return the tokens of a prompt that are computed: all behind what others began with."""
    return max(1.0, traffic.prompt.expected - traffic.shared_prefix)


class Steps(NamedTuple):
    """Steps of lanes in the long run, for several sizes at once."""

    rows: FloatArray  # decodes of a step
    chunked: FloatArray  # share of the steps that have a chunk of a prompt
    per_s: FloatArray  # steps of all lanes
    ideal: FloatArray  # the same if no lane waited for another
    turn_s: FloatArray  # from one step of a lane to its next


def rows_held(
    traffic: Traffic, tokens: FloatArray, chunk: FloatArray, most: FloatArray
) -> FloatArray:
    """Return the decodes of a step.

    `tokens` that a lane's pages hold, `chunk` tokens of a step, `most` sequences.
    """
    held, prompt, output = Held.of(traffic), own_prompt(traffic), traffic.output.expected
    room = np.maximum(0.0, tokens - held.common - held.spare)
    low, high = np.zeros_like(room), np.minimum(most, chunk * output / (prompt + output))
    for _ in range(_HALVINGS):
        rows = (low + high) / 2.0
        under_way = rows / output * np.maximum(1.0, prompt / (chunk - rows))
        fits = (rows * held.decode + under_way * held.prompt <= room) & (rows + under_way <= most)
        low, high = np.where(fits, rows, low), np.where(fits, high, rows)
    return np.maximum(low, 1e-6)


class Chunks(NamedTuple):
    """Tokens of prompts in the steps that have some."""

    mean: FloatArray
    largest: FloatArray  # of those that are under way on all lanes
    share: FloatArray  # of the steps


def chunks_of(traffic: Traffic, rows: FloatArray, chunk: FloatArray, lanes: FloatArray) -> Chunks:
    """Return what steps have of prompts: those of as many requests as end meanwhile."""
    prompt, ends = own_prompt(traffic), rows / traffic.output.expected
    whole = ends * prompt / -np.expm1(-ends)  # of the prompts that come with a step, if any does
    most = np.maximum(1.0, chunk - rows)
    mean = np.maximum(1.0, np.minimum(most, whole))
    spread = np.sqrt(ends * prompt * traffic.prompt.lasting)
    far = np.array([_NORMAL.inv_cdf((n - 0.375) / (n + 0.25)) for n in lanes.ravel().tolist()])
    largest = np.minimum(most, whole + np.maximum(0.0, far.reshape(lanes.shape)) * spread)
    return Chunks(mean, np.maximum(mean, largest), np.minimum(1.0, ends * prompt / mean))


def steps_of(
    problem: ServeProblem,
    stages: Sequence[tuple[ChipGroup, int]],
    wires: tuple[float, float],
    lanes: FloatArray,
    tokens: FloatArray,
    chunk: FloatArray,
    most: FloatArray,
) -> Steps:
    """Return the steps of an engine that does both, of so many lanes, tokens per lane and chunk.

    `wires`: the latencies of all ways between stages, and seconds per token over them.
    """
    traffic = problem.service.traffic
    rows = rows_held(traffic, tokens, chunk, most)
    chunks = chunks_of(traffic, rows, chunk, lanes)
    before = (traffic.prompt.lasting + traffic.shared_prefix) / 2.0
    busiest, whole = np.zeros_like(rows), np.zeros_like(rows)
    last = len(stages) - 1
    alike = Counter(
        (id(kind), layers, place == last) for place, (kind, layers) in enumerate(stages)
    )
    known = {id(kind): kind for kind, _ in stages}
    for (name, layers, has_head), count in alike.items():
        kind = known[name]
        keys = np.interp(rows, BATCHES, kind.keys_s)
        fixed = np.full_like(rows, 0.0 if last else kind.host_s)
        if has_head:
            fixed = fixed + np.interp(rows, BATCHES, kind.head_s)
        plain = layers * (np.interp(rows, BATCHES, kind.rows_s) + keys)
        times = []
        for beside in (chunks.mean, chunks.largest):
            products = np.interp(rows + beside, STEP_TOKENS, kind.step_s)
            one = layers * (products + keys + kind.pair_s * before * beside)
            times.append(np.maximum(plain, one) + fixed)
        mean = chunks.share * times[0] + (1.0 - chunks.share) * (plain + fixed)
        busiest = np.maximum(busiest, mean)
        whole += count * times[1] if last else mean
    whole = whole + wires[0] + wires[1] * (rows + chunks.largest)
    per_s = np.minimum(1.0 / busiest, lanes / whole)
    return Steps(rows, chunks.share, per_s, 1.0 / busiest, lanes / per_s)
