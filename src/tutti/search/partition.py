"""Consecutive units onto consecutive stages so that the slowest stage is as fast as possible.

Stages may be of unlike chips: each has its own seconds and bytes per unit and its own memory. The
answer is exact. For a given limit on the stage time a greedy walk that gives every stage as many
units as it can take decides whether the units fit (taking more units earlier never hurts, because
times and bytes only grow with units); the smallest limit that fits is found among the finitely
many stage times. Where several cuts reach it, the one with the smallest *sum* of stage times is
taken, which is what fills and drains the pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """What each unit would cost on one stage; a stage holds at least one unit."""

    seconds: FloatArray  # per unit, of one micro-batch
    bytes: FloatArray  # per unit, all that grows with it
    fixed_bytes: float = 0.0
    limit_bytes: float = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Half-open unit ranges, one per stage, with their seconds."""

    cuts: tuple[tuple[int, int], ...]
    seconds: tuple[float, ...]

    @property
    def slowest(self) -> float:
        """The stage time that sets the pace."""
        return max(self.seconds)


def partition(stages: Sequence[StageCosts]) -> Partition | None:
    """Return the best cut of all units over the stages, or None if none fits into memory.

    Minimises the slowest stage, then the sum of all stages.
    """
    num_stages, num_units = len(stages), len(stages[0].seconds)
    if num_stages > num_units:
        return None
    sums = np.stack([np.concatenate(([0.0], np.cumsum(s.seconds))) for s in stages])
    reach = np.stack([_memory_reach(stage) for stage in stages])
    limit = _smallest_limit(sums, reach)
    if limit is None:
        return None
    return _least_sum(sums, reach, limit)


def _memory_reach(stage: StageCosts) -> npt.NDArray[np.int64]:
    """For each first unit, the end (exclusive) up to which memory lasts."""
    sums = np.concatenate(([0.0], np.cumsum(stage.bytes)))
    room = stage.limit_bytes - stage.fixed_bytes
    ends = np.searchsorted(sums, sums + room * (1 + 1e-12), side="right") - 1
    return np.maximum(ends, np.arange(len(sums))).astype(np.int64)


def _fits(sums: FloatArray, reach: npt.NDArray[np.int64], limit: float) -> bool:
    """Tell whether stages of at most `limit` seconds hold all units; exact by a small DP.

    A stage must hold a unit, and a greedy walk may run out of units for the stages behind it; the
    set of reachable cut positions, kept as an interval, says whether the end can be reached.
    """
    num_stages, width = sums.shape
    reachable = np.zeros(width, dtype=bool)
    reachable[0] = True
    for s in range(num_stages):
        following = np.zeros(width, dtype=bool)
        starts = np.flatnonzero(reachable)
        by_time = np.searchsorted(sums[s], sums[s][starts] + limit * (1 + 1e-12), side="right") - 1
        ends = np.minimum(by_time, reach[s][starts])
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            following[start + 1 : end + 1] = True
        reachable = following
        if not reachable.any():
            return False
    return bool(reachable[width - 1])


def _smallest_limit(sums: FloatArray, reach: npt.NDArray[np.int64]) -> float | None:
    """Return the smallest stage time that fits, by bisection over all times a stage can have."""
    times = np.unique(np.concatenate([_range_times(row) for row in sums]))
    if not _fits(sums, reach, float(times[-1])):
        return None
    low, high = 0, len(times) - 1
    while low < high:
        middle = (low + high) // 2
        if _fits(sums, reach, float(times[middle])):
            high = middle
        else:
            low = middle + 1
    return float(times[low])


def _range_times(sums: FloatArray) -> FloatArray:
    """All times that consecutive units can take on a stage."""
    first, last = np.triu_indices(len(sums), k=1)
    return sums[last] - sums[first]


def _least_sum(sums: FloatArray, reach: npt.NDArray[np.int64], limit: float) -> Partition:
    """Among cuts within the limit, the one with the smallest sum of stage times (exact DP)."""
    num_stages, width = sums.shape
    best = np.full((num_stages + 1, width), np.inf)
    origin = np.zeros((num_stages + 1, width), dtype=np.int64)
    best[0, 0] = 0.0
    for s in range(num_stages):
        for start in np.flatnonzero(np.isfinite(best[s])).tolist():
            by_time = np.searchsorted(sums[s], sums[s][start] + limit * (1 + 1e-12), side="right")
            end = min(int(by_time) - 1, int(reach[s][start]))
            if end <= start:
                continue
            span = slice(start + 1, end + 1)
            total = best[s, start] + sums[s][span] - sums[s][start]
            better = total < best[s + 1, span]
            best[s + 1, span] = np.where(better, total, best[s + 1, span])
            origin[s + 1, span] = np.where(better, start, origin[s + 1, span])
    cuts: list[tuple[int, int]] = []
    stop = width - 1
    for s in range(num_stages, 0, -1):
        start = int(origin[s, stop])
        cuts.append((start, stop))
        stop = start
    cuts.reverse()
    seconds = tuple(float(sums[s][b] - sums[s][a]) for s, (a, b) in enumerate(cuts))
    return Partition(cuts=tuple(cuts), seconds=seconds)
