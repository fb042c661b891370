"""Promises: when a job that cannot start now will be able to, on which nodes, by what is expected.

A promise is kept because nobody who would still run by then is put on its nodes. It names nodes,
not numbers of them, so that it also holds where chips of one node are shared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tutti.fleet.chips import Fleet, as_mask, bits
from tutti.fleet.placement import fewest_now, tightest
from tutti.fleet.request import Shape


@dataclass(frozen=True, slots=True)
class Promise:
    """From then on these nodes are a job's."""

    job: str
    start: float
    mask: int
    shape: int = 0


def kept_free(promises: list[Promise], job: str, until: float) -> int:
    """Return the nodes that a job must leave alone if it runs until then."""
    found = 0
    for promise in promises:
        if promise.start < until and promise.job != job:
            found |= promise.mask
    return found


def earliest(
    fleet: Fleet, shape: Shape, number: int, job: str, now: float, promised: int, one_group: bool
) -> Promise | None:
    """Return the first time at which a shape is expected to find its nodes; None: never yet."""
    start, mask = now, 0
    for name, count in shape.nodes:
        pool = fleet.grounds.pool_names.index(name)
        found = _in_pool(fleet, pool, fleet.chips_of(pool, shape), count, promised, one_group)
        if found is None:
            return None
        start, mask = max(start, found[0]), mask | found[1]
    return Promise(job, start, mask, number)


def _in_pool(
    fleet: Fleet, pool: int, chips: int, count: int, promised: int, one_group: bool
) -> tuple[float, int] | None:
    times = fleet.free_times(pool, chips)
    grounds = fleet.grounds
    first = grounds.first[pool]
    if promised:
        times = times.copy()
        for node in bits(promised & grounds.pool_masks[pool]):
            times[node - first] = np.inf
    if count > len(times):
        return None
    if one_group and grounds.tiers:
        return _whole(times, count, first, grounds.tiers[0], 1)
    start = float(np.partition(times, count - 1)[count - 1])
    if start == np.inf:
        return None
    ready = as_mask(times <= start) << first
    return start, tightest(ready, count, grounds.tiers)


def compact(
    fleet: Fleet, pool: int, chips: int, count: int, groups: int, promised: int
) -> tuple[float, int] | None:
    """Return when so many nodes of a pool are expected to be free in so few groups, and which."""
    times = fleet.free_times(pool, chips)
    grounds = fleet.grounds
    first = grounds.first[pool]
    if promised:
        times = times.copy()
        for node in bits(promised & grounds.pool_masks[pool]):
            times[node - first] = np.inf
    return _whole(times, count, first, grounds.tiers[0], groups) if grounds.tiers else None


def _whole(
    times: np.ndarray[tuple[int], np.dtype[np.float64]],
    count: int,
    first: int,
    masks: tuple[int, ...],
    groups: int,
) -> tuple[float, int] | None:
    """Return the first time at which some groups together have enough nodes."""
    moments = np.unique(times[np.isfinite(times)])

    def ready(at: int) -> int:
        return as_mask(times <= moments[at]) << first

    low = _first_true(
        len(moments), lambda at: fewest_now(ready(at), count, (masks,)) <= groups
    )  # fmt: skip
    if low is None:
        return None
    return float(moments[low]), tightest(ready(low), count, (masks,))


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
