"""Measured times of collective programs, as `tutti bench comm --tune` writes them into a Profile.

A program's time on a shape of group is known at some sizes, and interpolated between them. It
corrects the program's price; one that was not measured is corrected by what others took against
theirs.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from statistics import median

from tutti.collective import Group, Operation
from tutti.hardware.profile import CollectiveTime

_OWN = 0.75  # of a correction; samples differ by a few percent, prices of chunks by tens
Priced = tuple[float, str, int]  # seconds, algorithm, chunks


def group_shape(group: Group) -> str:
    """Return the shape of a group: sizes, rails and relative NICs of its islands, not ranks."""
    slowest = min((b for i in group.islands for b in i.bandwidths if b), default=1.0)
    shape = []
    for island in group.islands:
        rails = "".join(f"r{rail}" for rail in island.rails)
        nics = ":".join(f"{b / slowest:.3g}" for b in island.bandwidths)
        shape.append(f"{island.size}{'/' + rails if rails else ''}{'@' + nics if nics else ''}")
    return " ".join(shape)


class Tuned:
    """The measured table of a Profile."""

    def __init__(self, measured: Iterable[CollectiveTime]) -> None:
        self._times: dict[tuple[str, str, str, int], list[tuple[float, float]]] = defaultdict(list)
        for one in measured:
            key = (one.operation, one.group, one.algorithm, one.chunks)
            self._times[key].append((one.bytes, one.seconds))
        for points in self._times.values():
            points.sort()

    def __bool__(self) -> bool:
        return bool(self._times)

    def seconds(
        self, operation: Operation, shape: str, algorithm: str, chunks: int, num_bytes: float
    ) -> float | None:
        """Return a measured time, between measured sizes interpolated; None outside them."""
        points = self._times.get((operation.value, shape, algorithm, chunks), [])
        if not points or not points[0][0] * 0.75 <= num_bytes <= points[-1][0] * 1.5:
            return None
        at = bisect_left([size for size, _ in points], num_bytes)
        if at == 0 or at == len(points):
            size, seconds = points[min(at, len(points) - 1)]
            return seconds * num_bytes / size
        (low, a), (high, b) = points[at - 1], points[at]
        share = math.log(num_bytes / low) / math.log(high / low)
        return math.exp((1 - share) * math.log(a) + share * math.log(b))

    def corrected(
        self, operation: Operation, group: Group, num_bytes: float, priced: list[Priced]
    ) -> list[Priced]:
        """Return prices, corrected by what was measured.

        A single measurement is noisy, and of many programs the luckiest would always win. So a
        part of a program's correction is its algorithm's, whose chunks are alike.
        """
        shape = group_shape(group)
        own: dict[tuple[str, int], float] = {}
        for seconds, algorithm, chunks in priced:
            measured = self.seconds(operation, shape, algorithm, chunks, num_bytes)
            if measured is not None:
                own[algorithm, chunks] = math.log(measured / seconds)
        if not own:
            return priced
        alike: dict[str, list[float]] = defaultdict(list)
        for (algorithm, _), correction in own.items():
            alike[algorithm].append(correction)
        # What nobody measured must look better than it is likely to be before it is tried.
        typical = max(median(own.values()), 0.0)
        corrected = []
        for seconds, algorithm, chunks in priced:
            kin = median(alike[algorithm]) if algorithm in alike else typical
            correction = _OWN * own.get((algorithm, chunks), kin) + (1 - _OWN) * kin
            corrected.append((seconds * math.exp(correction), algorithm, chunks))
        return corrected
