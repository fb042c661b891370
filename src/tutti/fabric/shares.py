"""Max-min fair shares: how fast everything goes when links are shared and nothing is wasted.

A *task* is anything with one pace that loads several links: a connection (weight 1 on each link of
its path), or a ring whose edges wait for each other (on each link as many bytes as the ring sends
over it in all). All tasks speed up together until a link is full; those on it stay, the others go
on. No task can then be faster without a slower one becoming slower still.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tutti.fabric.wiring import Floats, Integers
from tutti.loops import compiled


def fair_paces(offsets: Integers, links: Any, weights: Floats | None, rates: Floats) -> Floats:
    """Return the pace of every task; entries of −1 in `links` are skipped.

    Task t's entries are `links[offsets[t]:offsets[t + 1]]`, with the same entries of `weights`
    (1 where there are none). A task that loads nothing is infinitely fast.
    """
    from tutti.fabric.share_loops import fill  # here: whoever shares nothing need not load numba

    paces = np.full(len(offsets) - 1, np.inf)
    flat = np.ascontiguousarray(links).reshape(-1)
    given = np.ones(1) if weights is None else np.ascontiguousarray(weights).reshape(-1)
    rates = np.asarray(rates)
    if 2 * len(flat) < len(rates):  # few flows on many links: only theirs count
        used = np.unique(flat)
        flat = np.where(flat < 0, -1, np.searchsorted(used, flat)).astype(np.int32)
        rates = np.where(used < 0, 1.0, rates[used])
    compiled(fill)(offsets, flat, given, weights is not None, rates, paces)
    return paces


def fair_rates(paths: Any, rates: Floats) -> Floats:
    """Return the bytes per second of every flow, given each one's links as a row of `paths`."""
    offsets = np.arange(len(paths) + 1, dtype=np.int64) * paths.shape[1]
    return fair_paces(offsets, paths, None, rates)
