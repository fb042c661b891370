"""Who waits for whom, followed to its end. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set


def culprits(waits: Mapping[int, Set[int]]) -> tuple[int, ...]:
    """Return the ranks at the end of all waiting.

    `waits` has every rank that is blocked, and for whom. The end is a rank that is not blocked, or
    is blocked by nobody. Of a circle it is the rank that most wait for.
    """
    waited = {other for others in waits.values() for other in others}
    ends = {rank for rank in waited if not waits.get(rank)}
    if ends:
        return tuple(sorted(ends))
    counts = Counter(other for others in waits.values() for other in others)
    most = max(counts.values(), default=0)
    return tuple(sorted(rank for rank, count in counts.items() if count == most))
