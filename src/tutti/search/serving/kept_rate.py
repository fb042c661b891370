"""The largest rate that is kept, found by trying."""

from __future__ import annotations

import math
from collections.abc import Callable

FIRST_STEP = 1.05  # from a rate to the next that is tried; steps grow
LEAST = 1.0 / 64.0  # of the guess: what keeps less is of no use


def largest_kept(
    keeps: Callable[[float], bool],
    guess: float,
    *,
    close: float,
    least: float = 0.0,
    most: float = math.inf,
) -> float:
    """Return a rate that is kept while one `close` times as high is not; 0: none, or below `least`.

    Nothing above `most` is tried.
    """
    low, high, step = 0.0, math.inf, FIRST_STEP
    rate = min(guess, most)
    while low == 0.0 or high == math.inf:
        if keeps(rate):
            if rate >= most:
                return rate
            low, rate = rate, min(most, rate * step)
        else:
            if rate <= least:
                return 0.0
            high, rate = rate, rate / step
        step **= 1.5
        if rate < LEAST * guess:
            return 0.0
    while high / low > close:
        rate = math.sqrt(low * high)
        low, high = (rate, high) if keeps(rate) else (low, rate)
        if high <= least:
            return 0.0
    return low
