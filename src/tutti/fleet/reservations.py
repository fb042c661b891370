"""Promises: when a job that cannot start now will be able to, on which nodes, by what is expected.

A promise is kept because nobody who would still run by then is put on its nodes. It names nodes,
not numbers of them, so that it also holds where chips of one node are shared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tutti.fleet.chips import Fleet, Floats, Grounds, as_mask, bits
from tutti.fleet.placement import fewest_now, tightest
from tutti.fleet.request import JobRequest


@dataclass(frozen=True, slots=True)
class Promise:
    """From then on these nodes are a job's."""

    job: str
    start: float
    end: float  # as far as is known
    mask: int
    shape: int = 0


def kept_free(promises: list[Promise], job: str, until: float) -> int:
    """Return the nodes that a job must leave alone if it runs until then."""
    promised = 0
    for promise in promises:
        if promise.start < until and promise.job != job:
            promised |= promise.mask
    return promised


def earliest(
    fleet: Fleet,
    request: JobRequest,
    number: int,
    now: float,
    seconds: float,
    promises: list[Promise],
) -> Promise | None:
    """Return the first time at which a shape is expected to find its nodes; None: never yet."""
    start, mask, shape = now, 0, request.shapes[number]
    for name, count in shape.nodes:
        pool = fleet.grounds.pool_names.index(name)
        times = _times(fleet, pool, fleet.chips_of(pool, shape), promises)
        slot = _in_pool(fleet, pool, times, count, request.one_group)
        if slot is None:
            return None
        start, mask = max(start, slot[0]), mask | slot[1]
    return Promise(request.job, start, start + seconds, mask, number)


def _times(fleet: Fleet, pool: int, chips: int, promises: list[Promise]) -> Floats:
    """Return when nodes of a pool are free, also of those who are promised them."""
    times = fleet.free_times(pool, chips)
    first, own = fleet.grounds.first[pool], fleet.grounds.pool_masks[pool]
    if promises:
        times = times.copy()
        for promise in promises:
            for node in bits(promise.mask & own):
                times[node - first] = max(times[node - first], promise.end)
    return times


def _in_pool(
    fleet: Fleet, pool: int, times: Floats, count: int, one_group: bool
) -> tuple[float, int] | None:
    grounds = fleet.grounds
    first = grounds.first[pool]
    if count > len(times):
        return None
    if one_group and grounds.tiers:
        return _whole(times, count, pool, grounds, 1)
    start = float(np.partition(times, count - 1)[count - 1])
    if start == np.inf:
        return None
    ready = as_mask(times <= start) << first
    return start, tightest(ready, count, grounds.tiers, grounds.border)


def compact(
    fleet: Fleet, pool: int, chips: int, count: int, groups: int, promises: list[Promise]
) -> tuple[float, int] | None:
    """Return when so many nodes of a pool are expected to be free in so few groups, and which."""
    grounds = fleet.grounds
    if not grounds.tiers:
        return None
    times = _times(fleet, pool, chips, promises)
    return _whole(times, count, pool, grounds, groups)


def _whole(
    times: Floats,
    count: int,
    pool: int,
    grounds: Grounds,
    groups: int,
) -> tuple[float, int] | None:
    """Return the first time at which some groups together have enough nodes."""
    moments = np.unique(times[np.isfinite(times)])

    def ready(at: int) -> int:
        return as_mask(times <= moments[at]) << grounds.first[pool]

    low = _first_true(
        len(moments), lambda at: fewest_now(ready(at), count, grounds.groups) <= groups
    )  # fmt: skip
    if low is None:
        return None
    return float(moments[low]), tightest(ready(low), count, grounds.tiers, grounds.border)


def _first_true(size: int, holds: Callable[[int], bool]) -> int | None:
    """Return the first number that something holds for, which then holds for all after it."""
    if not size or not holds(size - 1):
        return None
    low, high = 0, size - 1
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low
