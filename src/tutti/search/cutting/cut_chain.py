"""Where to cut a chain of unlike stages, with remedies only where memory asks for them.

For every stage and every range of units there is a shortest time under the stage's memory
(`remedies`). Over these tables the best cut is exact: the smallest possible time of the slowest
range, and among those cuts the smallest sum. Where stages have several ranges, units then move
between stages as long as the slowest stage gains, and the ranges of a stage share its memory.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from tutti.plan.plan import Offload, Recompute
from tutti.search.cutting.memory_relief import Remedies, Slot
from tutti.simulate.kernel import compiled

Ranges = tuple[tuple[int, int], ...]
LEAST_GAIN = 0.01  # of the slowest stage, for which its ranges may become less equal


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCut:
    """The best cut: half-open ranges per stage, and what memory made of them."""

    ranges: Ranges
    seconds: tuple[float, ...]  # of one micro-batch
    recompute: tuple[Recompute, ...]
    offload: tuple[Offload, ...]

    @property
    def pace(self) -> float:
        """The slowest stage."""
        return max(self.seconds)


def best_cut(slots: list[Slot], given: list[tuple[int, int]] | None = None) -> StageCut | None:
    """Return the best cut of all units over the slots, or the given one; None: does not fit.

    Where stages have several ranges, all stages' slots come once for the first of them, then once
    for the second, and so on.
    """
    if len(slots) > slots[0].table.forward.shape[1]:
        return None
    cutter = Cutter(slots)
    ranges = cutter.best() if given is None else tuple(given)
    return None if ranges is None else cutter.cut(ranges)


class Cutter:
    """Cuts the model for the stages of one chain."""

    def __init__(self, slots: list[Slot]) -> None:
        self.stages = len(slots) // slots[0].ranges
        distinct: dict[object, int] = {}
        self._remedies: list[Remedies] = []
        self._index = np.empty(len(slots), dtype=np.int64)
        for position, slot in enumerate(slots):
            if slot.key not in distinct:
                distinct[slot.key] = len(self._remedies)
                self._remedies.append(Remedies(slot))
            self._index[position] = distinct[slot.key]
        self._own = [self._remedies[i] for i in self._index]

    def best(self) -> Ranges | None:
        """Return the best ranges; None where nothing fits."""
        seconds = np.stack([remedies.seconds for remedies in self._remedies])
        bounds = compiled(_solve)(seconds, self._index)
        if bounds[0] < 0:
            return None
        if len(self._index) > self.stages:
            compiled(_balance)(seconds, self._index, self.stages, bounds)
        return tuple((int(a), int(b)) for a, b in itertools.pairwise(bounds))

    def cut(self, ranges: Ranges) -> StageCut | None:
        """Return what memory makes of some ranges; None where a stage does not fit."""
        return self._together(ranges) if len(ranges) > self.stages else self._apart(ranges)

    def _apart(self, ranges: Ranges) -> StageCut | None:
        """Return the cut of stages with one range each."""
        pairs = list(zip(self._own, ranges, strict=True))
        seconds = tuple(float(remedies.seconds[span]) for remedies, span in pairs)
        if not all(map(math.isfinite, seconds)):
            return None
        parts = [remedies.part(*span) for remedies, span in pairs]
        return StageCut(
            ranges=ranges,
            seconds=seconds,
            recompute=tuple(recompute for recompute, _ in parts),
            offload=tuple(offload for _, offload in parts),
        )

    def _together(self, ranges: Ranges) -> StageCut | None:
        """Return the cut of stages whose ranges share memory."""
        seconds = [0.0] * len(ranges)
        recompute, offload = [Recompute()] * len(ranges), [Offload()] * len(ranges)
        for s in range(self.stages):
            shared = self._own[s].together(ranges[s :: self.stages])
            if shared is None:
                return None
            seconds[s :: self.stages] = shared[0]
            recompute[s :: self.stages] = [part[0] for part in shared[1]]
            offload[s :: self.stages] = [part[1] for part in shared[1]]
        return StageCut(
            ranges=ranges,
            seconds=tuple(seconds),
            recompute=tuple(recompute),
            offload=tuple(offload),
        )


def _balance(  # pragma: no cover - compiled
    seconds: Any, index: Any, stages: int, bounds: Any
) -> None:
    """Shift neighbouring boundaries by a unit as long as the slowest stages gain.

    A range of the slowest stage gives a unit up to a range before or behind it; those between them
    move. High powers of the stages' times, added up, decide. Ranges that are as long as one another
    are worth something, too: what gains little is left alone.
    """
    count = len(index)
    sums, other = np.zeros(stages), np.zeros(stages)
    for i in range(count):
        sums[i % stages] += seconds[index[i], bounds[i], bounds[i + 1]]
    before, at_first = bounds.copy(), sums.max()
    for _ in range(4 * count):
        worst = int(np.argmax(sums))
        scale = sums[worst]
        now = 0.0
        for s in range(stages):
            now += (sums[s] / scale) ** 16
        best, low, high, step = now * (1.0 - LEAST_GAIN), 0, 0, 0
        for shrinks in range(worst, count, stages):
            for grows in range(count):
                if grows == shrinks:
                    continue
                # Boundaries i..j move: the range before them and the one behind them change.
                if grows < shrinks:
                    i, j, d = grows + 1, shrinks, 1
                else:
                    i, j, d = shrinks + 1, grows, -1
                other[:] = sums
                for r in range(i - 1, j + 1):
                    a = bounds[r] + (d if r >= i else 0)
                    b = bounds[r + 1] + (d if r < j else 0)
                    if a >= b:
                        other[r % stages] = np.inf
                        break
                    other[r % stages] += seconds[index[r], a, b]
                    other[r % stages] -= seconds[index[r], bounds[r], bounds[r + 1]]
                gained = 0.0
                for s in range(stages):
                    gained += (other[s] / scale) ** 16
                if gained < best:
                    best, low, high, step = gained, i, j, d
        if step == 0:
            break
        for r in range(low, high + 1):
            bounds[r] += step
        sums[:] = 0.0
        for i in range(count):
            sums[i % stages] += seconds[index[i], bounds[i], bounds[i + 1]]
    if sums.max() > (1.0 - LEAST_GAIN) * at_first:
        bounds[:] = before


def _solve(seconds: Any, index: Any) -> Any:  # pragma: no cover - compiled
    """Return the cut positions; the first is −1 where no cut exists."""
    stages, units = len(index), seconds.shape[1] - 1
    low, high = 0.0, 0.0
    for k in range(seconds.shape[0]):
        for a in range(units):
            for b in range(a + 1, units + 1):
                if np.isfinite(seconds[k, a, b]):
                    high = max(high, seconds[k, a, b])
    none = np.full(stages + 1, -1, dtype=np.int64)
    reach = np.zeros(units + 1, dtype=np.bool_)
    following = np.zeros(units + 1, dtype=np.bool_)
    for attempt in range(64):
        limit = high if attempt == 0 else 0.5 * (low + high)
        reach[:] = False
        reach[0] = True
        for s in range(stages):
            following[:] = False
            row = seconds[index[s]]
            for a in range(units):
                if reach[a]:
                    for b in range(a + 1, units + 1):
                        if row[a, b] > limit:
                            break
                        following[b] = True
            reach[:] = following
        if reach[units]:
            high = limit
        elif attempt == 0:
            return none
        else:
            low = limit
        if high - low <= 1e-12 * high:
            break
    limit = high
    best = np.full((stages + 1, units + 1), np.inf)
    origin = np.zeros((stages + 1, units + 1), dtype=np.int64)
    best[0, 0] = 0.0
    for s in range(stages):
        row = seconds[index[s]]
        for a in range(units):
            if best[s, a] == np.inf:
                continue
            for b in range(a + 1, units + 1):
                if row[a, b] > limit:
                    break
                total = best[s, a] + row[a, b]
                if total < best[s + 1, b] * (1.0 - 1e-12):
                    best[s + 1, b] = total
                    origin[s + 1, b] = a
    bounds = np.zeros(stages + 1, dtype=np.int64)
    bounds[stages] = units
    for s in range(stages, 0, -1):
        bounds[s - 1] = origin[s, bounds[s]]
    return bounds
