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


def _sift_down(heap: Any, keys: Any, at: Any, size: Any) -> Any:
    """Let an entry of a heap sink to its place (compiled)."""
    while True:
        child = 2 * at + 1
        if child >= size:
            return
        if child + 1 < size and keys[child + 1] < keys[child]:
            child += 1
        if keys[at] <= keys[child]:
            return
        heap[at], heap[child] = heap[child], heap[at]
        keys[at], keys[child] = keys[child], keys[at]
        at = child


sift_down = compiled(_sift_down)


def fill(offsets: Any, links: Any, weights: Any, weighted: Any, rates: Any, paces: Any) -> None:
    """Fill the links, the tightest first; its tasks are then settled (compiled)."""
    num_tasks, num_links = len(offsets) - 1, len(rates)
    load = np.zeros(num_links)
    counts = np.zeros(num_links + 1, dtype=np.int64)
    for at in range(len(links)):
        link = links[at]
        if link >= 0:
            load[link] += weights[at] if weighted else 1.0
            counts[link + 1] += 1
    for link in range(num_links):
        counts[link + 1] += counts[link]
    users = np.empty(counts[num_links], dtype=np.int32)
    place = counts[:-1].copy()
    for task in range(num_tasks):
        for at in range(offsets[task], offsets[task + 1]):
            link = links[at]
            if link >= 0:
                users[place[link]] = task
                place[link] += 1
    left, unsettled = rates.copy(), counts[1:] - counts[:-1]
    keys = np.empty(num_links)
    heap = np.empty(num_links, dtype=np.int64)
    size = 0
    for link in range(num_links):
        if load[link] > 0:
            heap[size], keys[size] = link, left[link] / load[link]
            size += 1
    # a heap by pace; a link's pace only rises while others are settled, so stale ones sink
    for start in range(size // 2 - 1, -1, -1):
        sift_down(heap, keys, start, size)
    while size > 0:
        link = heap[0]
        gone = unsettled[link] == 0
        pace = np.inf if gone else max(left[link], 0.0) / max(load[link], 1e-300)
        if not gone and pace <= keys[0] * (1.0 + 1e-12):
            for i in range(counts[link], counts[link + 1]):
                task = users[i]
                if paces[task] != np.inf:
                    continue
                paces[task] = pace
                for at in range(offsets[task], offsets[task + 1]):
                    other = links[at]
                    if other >= 0:
                        weight = weights[at] if weighted else 1.0
                        left[other] -= weight * pace
                        load[other] -= weight
                        unsettled[other] -= 1
            gone = True
        if gone:
            size -= 1
            heap[0], keys[0] = heap[size], keys[size]
        else:
            keys[0] = pace
        sift_down(heap, keys, 0, size)
