"""The loop over the events of equal engines, compiled: arrivals, and steps that begin and end.

It does what `run` and `simulated_engine` do step by step, for plain requests (see
`batching.plain_steps`) at nominal prices, in the same order; the tests hold both against each
other. `engine_groups` makes its arrays.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tutti.batching import plain_steps
from tutti.batching.plain_steps import (
    COUNT,
    FREE,
    JOB,
    LENGTH,
    LOST,
    MOST,
    SAMPLED,
    SLOT,
    START,
    USED,
    WAITING,
)  # fmt: skip
from tutti.loops import compiled

TOKENS, SAMPLES, ROWS, KEYS, PAIRS, LOAD_FIELDS = range(6)  # of a step's load
ENGINES, LANES, AHEAD, IMPORTS, PAGES, SHAPE_FIELDS = range(6)  # of a group
BEGAN, FIRST, ENDED, TIME_FIELDS = range(4)  # of a job
MADE, MADE_TOKENS, MADE_ROWS, MADE_LOST, MOST_PAGES, USE_FIELDS = range(6)  # of an engine
HOST, BACK_S, OWN_FIELDS = range(3)  # the host's seconds, and those of what was sampled, back
# of a lane: rows of the step under way; requests that came since it was made; what was noted last
UNDER_WAY, LATE, LATE_HEAD, LATE_TAIL, NOTED, NOTED_USED, FLIGHT_FIELDS = range(7)
# of a lane: when its step ends, when the first stage is free for it, in which order that was said;
# when its step began; tokens of its requests; when somebody waited for it last
DUE, READY, DUE_SAID, READY_SAID, SINCE, WORK, WAITED, CLOCK_FIELDS = range(8)
SAID, OVER, ALL_WAITING, ALL_USED, POINTS, POINT_STEPS, IN_POINT, COUNT_FIELDS = range(8)

enter, make_step, clear = plain_steps.enter, plain_steps.make_step, plain_steps.clear


class Group(NamedTuple):
    """Equal engines, their requests and their prices."""

    times: Any  # of jobs: when they come
    jobs: Any  # see `plain_steps`
    work: Any
    behind: Any  # of jobs that came late: who came next
    seen: Any  # of jobs: times
    lane_of: Any
    order: Any  # in which they ended
    shape: Any
    sizes: Any
    slots: Any  # by lanes, as all up to `clock`
    lane: Any
    rows: Any
    flight: Any
    clock: Any
    free: Any  # by engines and stages, as `busy`
    busy: Any
    engine_work: Any
    use: Any
    queue: Any  # time, waiting, with a slot; points are thinned when there are too many
    count: Any
    load: Any
    parts: Any  # seconds of a step on each kind of stage
    counts: Any  # over which the next two are
    products: Any  # by kinds of stages
    heads: Any
    attention: Any
    places: Any  # of stages: their kind
    wires: Any  # between stages: latency, seconds per token
    own: Any


def _load_of(rows: Any, num: Any, imports: Any, load: Any) -> None:
    """Sum up what a step asks of a stage (compiled)."""
    for field in range(LOAD_FIELDS):
        load[field] = 0.0
    for row in range(num):
        start, count = rows[row, START], rows[row, COUNT]
        load[SAMPLES] += rows[row, SAMPLED]
        if count == 1 or imports:  # a prompt came over a link: its last token alone is computed
            load[TOKENS] += 1
            load[ROWS] += 1
            load[KEYS] += start + count
        else:
            load[TOKENS] += count
            load[PAIRS] += (start + 1.0 + (start + count)) / 2.0 * count


load_of = compiled(_load_of)


def _at(count: Any, counts: Any, curves: Any, kind: Any) -> Any:
    """Return a curve over counts; beyond them, by the last rate (compiled)."""
    low, high = 0, len(counts) - 1
    if count >= counts[high]:
        return curves[kind, high] * count / counts[high]
    while high - low > 1:
        middle = (low + high) // 2
        if counts[middle] <= count:
            low = middle
        else:
            high = middle
    part = (count - counts[low]) / (counts[high] - counts[low])
    return curves[kind, low] + part * (curves[kind, high] - curves[kind, low])


at = compiled(_at)


def _pass_stages(g: Any, engine: Any, now: Any) -> Any:
    """Let a step pass the stages; return when its tokens are there (compiled)."""
    load, ends, last = g.load, now, len(g.places) - 1
    for kind in range(len(g.parts)):
        total = at(load[TOKENS], g.counts, g.products, kind)
        for each in range(g.attention.shape[1]):
            keys, pairs = g.attention[kind, each, 1], g.attention[kind, each, 2]
            total += g.attention[kind, each, 0] * (
                keys * load[KEYS] + pairs * load[PAIRS] + g.attention[kind, each, 3] * load[ROWS]
            )
        if load[SAMPLES]:
            total += at(load[SAMPLES], g.counts, g.heads, kind)
        g.parts[kind] = total
    for stage in range(last + 1):
        taken = g.parts[g.places[stage]]
        if stage == 0:
            taken += g.own[HOST]
        ends = max(ends, g.free[engine, stage]) + taken
        g.free[engine, stage] = ends
        g.busy[engine, stage] += taken
        if stage < last:
            ends += g.wires[stage, 0] + load[TOKENS] * g.wires[stage, 1]
    return ends + g.own[BACK_S]


pass_stages = compiled(_pass_stages)


def _come(g: Any, job: Any) -> Any:
    """Give a request to the engine and the lane with least to do; return the lane (compiled)."""
    engine = 0
    for each in range(1, g.shape[ENGINES]):
        if g.engine_work[each] < g.engine_work[engine]:
            engine = each
    lanes = g.shape[LANES]
    which = engine * lanes
    for each in range(engine * lanes, (engine + 1) * lanes):
        if g.clock[each, WORK] < g.clock[which, WORK]:
            which = each
    g.clock[which, WORK] += g.work[job]
    g.engine_work[engine] += g.work[job]
    g.lane_of[job] = which
    flight = g.flight[which]
    if not (g.shape[AHEAD] and flight[UNDER_WAY]):
        enter(g.lane[which], g.jobs, job)
        return which
    if flight[LATE]:
        g.behind[flight[LATE_TAIL]] = job
    else:
        flight[LATE_HEAD] = job
    flight[LATE_TAIL] = job
    flight[LATE] += 1
    return which


come = compiled(_come)


def _enter_late(g: Any, which: Any, until: Any) -> None:
    """Let the scheduler know of those who came up to a time while a step was made (compiled)."""
    flight = g.flight[which]
    while flight[LATE] and g.times[flight[LATE_HEAD]] <= until:
        enter(g.lane[which], g.jobs, flight[LATE_HEAD])
        flight[LATE_HEAD] = g.behind[flight[LATE_HEAD]]
        flight[LATE] -= 1


enter_late = compiled(_enter_late)


def _note_queue(g: Any, which: Any, now: Any) -> None:
    """Note who waits; of points that are too many, two become one with the most of both."""
    flight, count = g.flight[which], g.count
    waits, used = g.lane[which, WAITING] + flight[LATE], g.lane[which, USED]
    if waits:
        g.clock[which, WAITED] = now
    count[ALL_WAITING] += waits - flight[NOTED]
    count[ALL_USED] += used - flight[NOTED_USED]
    flight[NOTED], flight[NOTED_USED] = waits, used
    if count[IN_POINT] == count[POINT_STEPS]:
        count[IN_POINT] = 0
    if not count[IN_POINT] and count[POINTS] == len(g.queue):
        for point in range(len(g.queue) // 2):
            g.queue[point, 0] = g.queue[2 * point, 0]
            for field in (1, 2):
                two = g.queue[2 * point, field], g.queue[2 * point + 1, field]
                g.queue[point, field] = max(two)
        count[POINTS], count[POINT_STEPS] = len(g.queue) // 2, 2 * count[POINT_STEPS]
    if not count[IN_POINT]:
        g.queue[count[POINTS], 0] = now
        g.queue[count[POINTS], 1] = g.queue[count[POINTS], 2] = 0
        count[POINTS] += 1
    point = g.queue[count[POINTS] - 1]
    point[1], point[2] = max(point[1], count[ALL_WAITING]), max(point[2], count[ALL_USED])
    count[IN_POINT] += 1


note_queue = compiled(_note_queue)


def _end(g: Any, which: Any, now: Any) -> None:
    """Take the tokens of a lane's step (compiled)."""
    slots, engine = g.slots[which], which // g.shape[LANES]
    for row in range(g.flight[which, UNDER_WAY]):
        if g.rows[which, row, SAMPLED]:
            job = slots[JOB, g.rows[which, row, SLOT]]
            if g.seen[job, FIRST] < 0:
                g.seen[job, FIRST] = now
    for slot in range(slots.shape[1]):
        job = slots[JOB, slot]
        if job < 0 or slots[LENGTH, slot] < slots[MOST, slot]:
            continue
        clear(slots, g.lane[which], slot)
        g.use[engine, MADE_LOST] += g.jobs[job, LOST]
        g.clock[which, WORK] -= g.work[job]
        g.engine_work[engine] -= g.work[job]
        g.seen[job, ENDED] = now
        g.order[g.count[OVER]] = job
        g.count[OVER] += 1
    g.flight[which, UNDER_WAY] = 0
    note_queue(g, which, now)


end = compiled(_end)


def _begin(g: Any, which: Any, now: Any) -> None:
    """Let a lane make a step if it has none and the first stage is free (compiled)."""
    engine, clock, flight = which // g.shape[LANES], g.clock[which], g.flight[which]
    if flight[UNDER_WAY]:
        return
    if g.free[engine, 0] > now + 1e-12:
        if clock[READY] == np.inf:
            g.count[SAID] += 1
            clock[READY], clock[READY_SAID] = g.free[engine, 0], g.count[SAID]
        return
    slots, lane, rows = g.slots[which], g.lane[which], g.rows[which]
    enter_late(g, which, clock[SINCE])
    made = make_step(slots, lane, g.jobs, rows, g.sizes)
    if not made and flight[LATE]:  # nothing was under way any more when they came
        enter_late(g, which, np.inf)
        made = make_step(slots, lane, g.jobs, rows, g.sizes)
    if not made:
        return
    flight[UNDER_WAY], clock[SINCE] = made, now
    for row in range(made):
        job = slots[JOB, rows[row, SLOT]]
        if rows[row, START] == 0 and g.seen[job, BEGAN] < 0:
            g.seen[job, BEGAN] = now
    load_of(rows, made, g.shape[IMPORTS], g.load)
    g.count[SAID] += 1
    clock[DUE], clock[DUE_SAID] = pass_stages(g, engine, now), g.count[SAID]
    use = g.use[engine]
    use[MADE] += 1
    use[MADE_TOKENS] += int(g.load[TOKENS])
    use[MADE_ROWS] += int(g.load[ROWS])
    use[MOST_PAGES] = max(use[MOST_PAGES], g.shape[PAGES] - lane[FREE])


begin = compiled(_begin)


def simulate_group(g: Any) -> None:
    """Let everything happen, by time, and at the same time as it was said (compiled)."""
    said, num = 0, len(g.times)
    job: Any = np.int64(0)
    while True:
        now = g.times[job] if job < num else np.inf
        which: Any = np.int64(-1)
        first = said
        for each in range(len(g.clock)):
            clock = g.clock[each]
            if clock[DUE] < now or (clock[DUE] == now and clock[DUE_SAID] < first):
                now, first, which = clock[DUE], clock[DUE_SAID], each
            if clock[READY] < now or (clock[READY] == now and clock[READY_SAID] < first):
                now, first, which = clock[READY], clock[READY_SAID], each
        if now == np.inf:
            return
        if which < 0:
            g.count[SAID] += 1
            said = g.count[SAID]
            which = come(g, job)
            job += 1
        elif g.clock[which, DUE] == now and g.clock[which, DUE_SAID] == first:
            g.clock[which, DUE] = np.inf
            end(g, which, now)
        else:
            g.clock[which, READY] = np.inf
        begin(g, which, now)
