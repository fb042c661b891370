"""The scheduler's steps for plain requests, compiled: for whoever simulates.

Where nobody shares beginnings, has windows, samples, priorities or guesses, and one step of a lane
is under way at a time, who is computed next follows from few numbers. These loops make the same
steps as `Scheduler`, which the tests hold against each other, at a hundredth of its price: who
reads tokens, tables and pages needs the scheduler itself. Arrays are of whole numbers:
`slots[field, slot]`, `lane[field]`, `jobs[job, field]`, `rows[row, field]`, `sizes[field]`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tutti.loops import compiled

# of a slot; job -1: it is free. `STACK` holds the free slots, who is next on top
JOB, ENTRY, LENGTH, COMPUTED, PAGES, GOAL, MOST, STACK, SLOT_FIELDS = range(9)
FREE, USED, WAITING, STEPS, ENTRIES, BACK, HEAD, TAIL, LANE_FIELDS = range(9)
# of a job: its lengths; the step and the place in which it entered; who is next in line; how often
# it lost its slot
PROMPT, LIMIT, KNOWN, ORDER, PLACE, NEXT, LOST, JOB_FIELDS = range(8)
SLOT, START, COUNT, SAMPLED, ROW_FIELDS = range(5)  # of a row of a step
PAGE_SIZE, MOST_TOKENS, SIZE_FIELDS = range(3)


def _clear(slots: Any, lane: Any, slot: Any) -> None:
    """Free a slot and its pages (compiled)."""
    lane[FREE] += slots[PAGES, slot]
    slots[STACK, slots.shape[1] - lane[USED]] = slot
    lane[USED] -= 1
    slots[JOB, slot] = -1


clear = compiled(_clear)


def _enter(lane: Any, jobs: Any, job: Any) -> None:
    """Put a job in line, behind all others (compiled)."""
    jobs[job, ORDER], jobs[job, PLACE] = lane[STEPS], lane[ENTRIES]
    jobs[job, KNOWN], jobs[job, NEXT] = jobs[job, PROMPT], -1
    if lane[HEAD] < 0:
        lane[HEAD] = job
    else:
        jobs[lane[TAIL], NEXT] = job
    lane[TAIL] = job
    lane[ENTRIES] += 1
    lane[WAITING] += 1


enter = compiled(_enter)


def _next_in_line(lane: Any) -> Any:
    """Return who is admitted next: those that gave their slots back came before (compiled)."""
    return lane[BACK] if lane[BACK] >= 0 else lane[HEAD]


next_in_line = compiled(_next_in_line)


def _last_in_order(slots: Any, below: Any) -> Any:
    """Return the slot that goes last of those that entered before `below` (compiled)."""
    last: Any = np.int64(-1)  # a plain -1 is a type of its own to numba
    for slot in range(slots.shape[1]):
        if slots[JOB, slot] < 0 or slots[ENTRY, slot] >= below:
            continue
        if last < 0 or slots[ENTRY, slot] > slots[ENTRY, last]:
            last = slot
    return last


last_in_order = compiled(_last_in_order)


def _preempt(slots: Any, lane: Any, jobs: Any, slot: Any) -> None:
    """Let a sequence give its slot back; it waits before all that never had one (compiled)."""
    job = slots[JOB, slot]
    jobs[job, KNOWN] = slots[LENGTH, slot]
    jobs[job, LOST] += 1
    clear(slots, lane, slot)
    lane[WAITING] += 1
    before, after = -1, lane[BACK]
    while after >= 0 and jobs[after, PLACE] < jobs[job, PLACE]:
        before, after = after, jobs[after, NEXT]
    jobs[job, NEXT] = after
    if before < 0:
        lane[BACK] = job
    else:
        jobs[before, NEXT] = job


preempt = compiled(_preempt)


def _promised(slots: Any, size: Any) -> Any:
    """Return the pages that sequences with a slot still need for what they have (compiled)."""
    more = 0
    for slot in range(slots.shape[1]):
        if slots[JOB, slot] >= 0:
            more += max(0, -(-slots[LENGTH, slot] // size) - slots[PAGES, slot])
    return more


promised = compiled(_promised)


def _to_do(slots: Any, slot: Any) -> Any:
    """Return the tokens of a sequence that are to be computed (compiled)."""
    return min(slots[LENGTH, slot], slots[GOAL, slot]) - slots[COMPUTED, slot]


to_do = compiled(_to_do)


def _add_row(slots: Any, lane: Any, rows: Any, num: Any, slot: Any, count: Any, size: Any) -> Any:
    """Add a row with the pages that it needs; return how many rows there are (compiled)."""
    start = slots[COMPUTED, slot]
    new = max(0, -(-(start + count) // size) - slots[PAGES, slot])
    slots[PAGES, slot] += new
    lane[FREE] -= new
    rows[num, SLOT], rows[num, START], rows[num, COUNT] = slot, start, count
    return num + 1


add_row = compiled(_add_row)


def _displace(slots: Any, lane: Any, jobs: Any, size: Any) -> None:
    """Let the last in order go if one that came before it waits and finds no room (compiled)."""
    waits = next_in_line(lane)
    if waits < 0 or not lane[USED]:
        return
    last = last_in_order(slots, lane[ENTRIES])
    if jobs[slots[JOB, last], ORDER] <= jobs[waits, ORDER]:
        return
    need = -(-jobs[waits, KNOWN] // size) + promised(slots, size) + lane[USED]
    if lane[USED] == slots.shape[1] or need > lane[FREE]:
        preempt(slots, lane, jobs, last)


displace = compiled(_displace)


def _sort(some: Any, count: Any, slots: Any) -> None:
    """Sort slots by who goes first (compiled)."""
    for place in range(1, count):
        slot, before = some[place], place - 1
        while before >= 0 and slots[ENTRY, some[before]] > slots[ENTRY, slot]:
            some[before + 1] = some[before]
            before -= 1
        some[before + 1] = slot


sort = compiled(_sort)


def _decodes(slots: Any, lane: Any, jobs: Any, rows: Any, sizes: Any) -> Any:
    """Add a row for every sequence that wants one token; return how many (compiled)."""
    size, budget = sizes[PAGE_SIZE], sizes[MOST_TOKENS]
    singles = np.empty(lane[USED], np.int64)
    count: Any = np.int64(0)
    needs: Any = np.int64(0)
    for slot in range(slots.shape[1]):
        if slots[JOB, slot] >= 0 and to_do(slots, slot) == 1:
            singles[count] = slot
            count += 1
            needs += slots[COMPUTED, slot] // size >= slots[PAGES, slot]
    if count > budget or needs > lane[FREE]:
        sort(singles, count, slots)
    if count > budget:
        count, needs = budget, 0
        for place in range(count):
            slot = singles[place]
            needs += slots[COMPUTED, slot] // size >= slots[PAGES, slot]
    below = lane[ENTRIES]
    for _ in range(lane[USED] - 1):  # the last in order give their pages to the first
        if needs <= lane[FREE]:
            break
        victim = last_in_order(slots, below)
        below = slots[ENTRY, victim]
        if count and singles[count - 1] == victim:
            count -= 1
            needs -= slots[COMPUTED, victim] // size >= slots[PAGES, victim]
        preempt(slots, lane, jobs, victim)
    num, taken, free, one = np.int64(0), 0, lane[FREE], np.int64(1)
    for place in range(count):
        slot = singles[place]
        fresh = slots[COMPUTED, slot] // size >= slots[PAGES, slot]
        taken += fresh
        if not fresh or taken <= free:
            num = add_row(slots, lane, rows, num, slot, one, size)
    return num


decodes = compiled(_decodes)


def _chunk(slots: Any, lane: Any, budget: Any, slot: Any, size: Any) -> Any:
    """Return how much of a prompt is computed: as much as there are tokens and pages (compiled)."""
    room = (slots[PAGES, slot] + lane[FREE]) * size - slots[COMPUTED, slot]
    return min(to_do(slots, slot), budget, room)


chunk = compiled(_chunk)


def _prompts(slots: Any, lane: Any, jobs: Any, rows: Any, num: Any, sizes: Any) -> Any:
    """Add chunks of prompts under way, then of those that get a slot (compiled)."""
    size, budget, behind = sizes[PAGE_SIZE], sizes[MOST_TOKENS] - num, -1
    while True:
        first: Any = np.int64(-1)
        for slot in range(slots.shape[1]):
            if slots[JOB, slot] < 0 or slots[ENTRY, slot] <= behind:
                continue
            sooner = first < 0 or slots[ENTRY, slot] < slots[ENTRY, first]
            if sooner and to_do(slots, slot) > 1:
                first = slot
        if first < 0:
            break
        behind = slots[ENTRY, first]
        count = chunk(slots, lane, budget, first, size)
        if count <= 0:
            return num
        budget -= count
        num = add_row(slots, lane, rows, num, first, count, size)
    while budget > 0 and lane[USED] < slots.shape[1]:
        job = next_in_line(lane)
        if job < 0:
            break
        need = -(-jobs[job, KNOWN] // size)
        if lane[USED] and need + promised(slots, size) + lane[USED] > lane[FREE]:
            break
        if lane[BACK] >= 0:
            lane[BACK] = jobs[job, NEXT]
        else:
            lane[HEAD] = jobs[job, NEXT]
        at = slots[STACK, slots.shape[1] - lane[USED] - 1]
        slots[JOB, at], slots[ENTRY, at] = job, jobs[job, PLACE]
        slots[LENGTH, at], slots[COMPUTED, at], slots[PAGES, at] = jobs[job, KNOWN], 0, 0
        slots[MOST, at] = jobs[job, LIMIT]
        slots[GOAL, at] = max(jobs[job, PROMPT], jobs[job, LIMIT] - 1)
        lane[USED] += 1
        lane[WAITING] -= 1
        count = chunk(slots, lane, budget, at, size)
        if count <= 0:
            break
        budget -= count
        num = add_row(slots, lane, rows, num, at, count, size)
    return num


prompts = compiled(_prompts)


def _make_step(slots: Any, lane: Any, jobs: Any, rows: Any, sizes: Any) -> Any:
    """Make a lane's next step; return its rows, 0: nothing can be computed now (compiled)."""
    while True:
        displace(slots, lane, jobs, sizes[PAGE_SIZE])
        num = decodes(slots, lane, jobs, rows, sizes)
        num = prompts(slots, lane, jobs, rows, num, sizes)
        if num:
            break
        if lane[USED] < 2:  # nobody else makes room for the first
            return 0
        preempt(slots, lane, jobs, last_in_order(slots, lane[ENTRIES]))
    for row in range(num):
        slot = rows[row, SLOT]
        slots[COMPUTED, slot] += rows[row, COUNT]
        rows[row, SAMPLED] = (
            slots[COMPUTED, slot] == slots[LENGTH, slot] and slots[LENGTH, slot] < slots[MOST, slot]
        )
        slots[LENGTH, slot] += rows[row, SAMPLED]
    lane[STEPS] += 1
    return num


make_step = compiled(_make_step)
