"""Whole sequences over unlike replicas so that the slowest is as fast as possible. Exact.

Each replica's time may be any non-decreasing function of its number of sequences, given as a
table; a replica may be left out (0 sequences) where that is allowed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


def split(
    total: int, tables: Sequence[FloatArray], *, least: int = 1
) -> tuple[tuple[int, ...], float] | None:
    """Return how many of `total` sequences each replica takes, and the slowest one's time.

    `tables[i][b]` is replica i's time for b sequences (infinite where they do not fit), for b from
    0 to `total`. The smallest time at which the replicas together can take all is found among the
    table entries; sequences beyond what is needed are taken off the slowest first, so that the
    answer does not depend on the order of the tables more than ties do.
    """
    if least * len(tables) > total:
        return None
    grown = [np.maximum.accumulate(np.asarray(table, dtype=np.float64)) for table in tables]
    times = np.unique(np.concatenate([table[least : total + 1] for table in grown]))
    times = times[np.isfinite(times)]

    def capacity(limit: float) -> list[int]:
        return [int(np.searchsorted(t[: total + 1], limit, side="right")) - 1 for t in grown]

    def enough(limit: float) -> bool:
        most = capacity(limit)
        return min(most) >= least and sum(most) >= total

    if not len(times) or not enough(float(times[-1])):
        return None
    low, high = 0, len(times) - 1
    while low < high:
        middle = (low + high) // 2
        if enough(float(times[middle])):
            high = middle
        else:
            low = middle + 1
    counts = capacity(float(times[low]))
    while sum(counts) > total:
        removable = [i for i, count in enumerate(counts) if count > least]
        slowest = max(removable, key=lambda i: (grown[i][counts[i]], i))
        counts[slowest] -= 1
    slowest_time = max(float(table[count]) for table, count in zip(grown, counts, strict=True))
    return tuple(counts), slowest_time
