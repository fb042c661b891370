"""The two hot loops, written once: compiled by numba for long schedules, plain Python for short.

Both ways run the same source, without fast-math, so that they give the same bits. They read and
write only by index: arrays under numba, lists (which Python indexes faster) without.
"""

from __future__ import annotations

import sys
from typing import Any, Literal

from tutti.loops import compiled, has_numba

__all__ = ["Backend", "attribute_idle", "choose", "compiled", "execute", "has_numba"]

Backend = Literal["auto", "numba", "python"]

# Below this many instructions, loading numba takes longer than the loop in plain Python.
SHORT = 20_000


def choose(backend: Backend, size: int) -> Literal["numba", "python"]:
    """Return what runs a program of `size` instructions."""
    if backend != "auto":
        return backend
    worth_it = size >= SHORT or "numba" in sys.modules
    return "numba" if worth_it and has_numba() else "python"


def execute(
    offsets: Any,
    kind: Any,
    channel: Any,
    after_offsets: Any,
    after: Any,
    meeting: Any,
    seconds: Any,
    missing: Any,  # per meeting: arrivals still to come
    arrival: Any,  # per meeting: the latest so far, −1 before the first
    arrival_by: Any,  # per meeting: the instruction that the latest one waited for, or was
    longest: Any,  # per meeting: the largest duration so far
    waiting: Any,  # per meeting: the first parked class, −1
    waiting_next: Any,  # per class: the next one parked at the same meeting
    channel_end: Any,
    channel_last: Any,
    position: Any,
    stack: Any,
    start: Any,
    end: Any,
    binding: Any,
) -> int:
    """Run every list in order, parking a class where it must wait; return how many ran.

    `binding` becomes the instruction whose end made this one start (−1: nothing did).
    """
    top = len(position)
    for c in range(top):
        stack[c] = top - 1 - c
    done = 0
    while top > 0:
        top -= 1
        c = stack[top]
        i = position[c]
        stop = offsets[c + 1]
        while i < stop:
            what = kind[i]
            g = meeting[i]
            if what == 2 and missing[g] > 0:
                waiting_next[c] = waiting[g]
                waiting[g] = c
                break
            ready = channel_end[channel[i]]
            by = channel_last[channel[i]]
            for e in range(after_offsets[i], after_offsets[i + 1]):
                if end[after[e]] > ready:
                    ready = end[after[e]]
                    by = after[e]
            if what == 2 and arrival[g] > ready:
                ready = arrival[g]
                by = arrival_by[g]
            duration = seconds[i]
            if what == 3:
                if ready > arrival[g]:
                    arrival[g] = ready
                    arrival_by[g] = by
                if duration > longest[g]:
                    longest[g] = duration
                missing[g] -= 1
                if missing[g] > 0:
                    waiting_next[c] = waiting[g]
                    waiting[g] = c
                    break
                ready = arrival[g]
                by = arrival_by[g]
                duration = longest[g]
            ended = ready + duration
            start[i] = ready
            end[i] = ended
            binding[i] = by
            channel_end[channel[i]] = ended
            channel_last[channel[i]] = i
            done += 1
            i += 1
            if what == 1:
                if ended > arrival[g]:
                    arrival[g] = ended
                    arrival_by[g] = i - 1
                missing[g] -= 1
            if what == 0 or what == 2 or missing[g] > 0:
                continue
            other = waiting[g]  # everything is here: those who wait go on
            waiting[g] = -1
            while other >= 0:
                if what == 3:
                    j = position[other]
                    start[j] = ready
                    end[j] = ended
                    binding[j] = by
                    channel_end[channel[j]] = ended
                    channel_last[channel[j]] = j
                    position[other] = j + 1
                    done += 1
                stack[top] = other
                top += 1
                other = waiting_next[other]
        position[c] = i
    return done


def attribute_idle(
    offsets: Any, track: Any, start: Any, end: Any, binding: Any, reason: Any, last: int, idle: Any
) -> None:
    """Explain every idle moment of every compute lane by what it waited for.

    From the instruction that ends a gap (or from the step's last one, behind the last pass) the
    binding predecessors are followed back in time; they touch each other, so that each moment of
    the gap falls into exactly one. `reason` maps its track to a column of `idle`.
    """
    for c in range(len(offsets) - 1):
        free = 0.0
        for i in range(offsets[c], offsets[c + 1] + 1):
            if i == offsets[c + 1]:
                by = last
                upper = end[last]
            elif track[i] == 0:
                by = binding[i]
                upper = start[i]
            else:
                continue
            while upper > free and by >= 0:
                low = start[by] if start[by] > free else free
                idle[c][reason[track[by]]] += upper - low
                upper = low
                by = binding[by]
            if i < offsets[c + 1]:
                free = end[i]
