"""The loop that fills links, for numba; `fabric.shares` loads it when first needed."""

from __future__ import annotations

from typing import Any

import numpy as np

from tutti.loops import compiled


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
