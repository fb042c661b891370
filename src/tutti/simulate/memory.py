"""Memory over time of one class of ranks, from what its instructions take and give back.

Events at one moment are put in the order in which they happen: first what instructions that began
earlier give back, then, by list order, what starts here (and ends here, if it takes no time). An
instruction never depends on a later one of its list, so nothing is given back before it is taken.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tutti.cost.plan.simulator_inputs import ClassCosts, FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class MemoryCurve:
    """Bytes in use: `bytes_after[i]` from `times[i]` until the next time; static at first."""

    times: FloatArray
    bytes_after: FloatArray
    static_bytes: float

    @property
    def peak_bytes(self) -> float:
        """The most in use at any time."""
        return max(self.static_bytes, float(self.bytes_after.max(initial=0.0)))

    @property
    def peak_time(self) -> float:
        """When the peak is first reached."""
        if not len(self.times) or self.bytes_after.max() <= self.static_bytes:
            return 0.0
        return float(self.times[int(np.argmax(self.bytes_after))])

    @property
    def least_bytes(self) -> float:
        """The least in use at any time; below the static part only if the costs are wrong."""
        return min(self.static_bytes, float(self.bytes_after.min(initial=np.inf)))

    @property
    def final_bytes(self) -> float:
        """What is in use when the step is over."""
        return float(self.bytes_after[-1]) if len(self.times) else self.static_bytes

    def envelope(self, until: float, points: int) -> FloatArray:
        """Return the maximum in each of `points` equal slices of time 0…until."""
        level = np.full(points, self.static_bytes)
        if not len(self.times) or until <= 0:
            return level
        edges = np.linspace(0.0, until, points + 1)
        before = np.searchsorted(self.times, edges[:-1], side="right") - 1
        level = np.where(before >= 0, self.bytes_after[np.maximum(before, 0)], self.static_bytes)
        slices = np.minimum((self.times / until * points).astype(np.int64), points - 1)
        np.maximum.at(level, slices, self.bytes_after)
        return level


def memory_curve(start: FloatArray, end: FloatArray, costs: ClassCosts) -> MemoryCurve:
    """Add up one class's allocations and releases."""
    taken = costs.allocate_bytes > 0
    given = costs.free_bytes > 0
    lasting = given & (end > start)
    instant = given & ~lasting
    index = np.arange(len(start))
    # Inside one moment: lasting ends first, then starts and instant ends, alternating by index.
    opening = np.concatenate([2 * index[taken], 2 * index[instant] + 1])
    times = np.concatenate([start[taken], end[instant]])
    deltas = np.concatenate([costs.allocate_bytes[taken], -costs.free_bytes[instant]])
    by_index = np.argsort(opening, kind="stable")
    times = np.concatenate([end[lasting], times[by_index]])
    deltas = np.concatenate([-costs.free_bytes[lasting], deltas[by_index]])
    order = np.argsort(times, kind="stable")
    return MemoryCurve(
        times[order], costs.static_bytes + np.cumsum(deltas[order]), costs.static_bytes
    )
