"""Attention of one token to keys in pages, compiled for the host: nothing is gathered or padded."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np


def _one_each(
    found: Any,  # (T, H, E)
    q: Any,  # (T, H, D)
    key_pages: Any,  # (P, size, G, D)
    value_pages: Any,
    tables: Any,
    rows: Any,  # those of one query
    starts: Any,  # where each row's query stands
    keys: Any,  # of each row
    firsts: Any,  # the first key that each row's query sees
    scale: float,
    soft_cap: float,  # 0: none
    sinks: Any,  # (H,) or empty
    slopes: Any,  # (H,) or empty
) -> None:
    """Fill in the attention of rows of one token."""
    heads, groups = q.shape[1], key_pages.shape[2]
    size, width, value_width = key_pages.shape[1], q.shape[2], value_pages.shape[3]
    share = heads // groups
    for item in numba.prange(len(rows) * groups):
        row, group = rows[item // groups], item % groups
        at, first, last = starts[row], firsts[row], keys[row]
        scores = np.empty((share, last - first), q.dtype)
        for key in range(first, last):
            line = key_pages[tables[row, key // size], key % size, group]
            for n in range(share):
                own = q[at, group * share + n]
                total = own[0] * line[0]
                for d in range(1, width):
                    total += own[d] * line[d]
                total *= scale
                if soft_cap != 0.0:
                    total = soft_cap * np.tanh(total / soft_cap)
                if len(slopes):
                    total += slopes[group * share + n] * key
                scores[n, key - first] = total
        for n in range(share):
            head = group * share + n
            largest = scores[n].max()
            whole = 0.0
            if len(sinks):
                largest = max(largest, sinks[head])
                whole = np.exp(sinks[head] - largest)
            for key in range(last - first):
                scores[n, key] = np.exp(scores[n, key] - largest)
                whole += scores[n, key]
            for key in range(last - first):
                scores[n, key] /= whole
            for e in range(value_width):
                found[at, head, e] = 0.0
        for key in range(first, last):
            line = value_pages[tables[row, key // size], key % size, group]
            for n in range(share):
                weight = scores[n, key - first]
                for e in range(value_width):
                    found[at, group * share + n, e] += weight * line[e]


def _compiled() -> Any:
    """Return the kernel, kept on disk where there is a place for it."""
    try:
        return numba.njit(cache=True, fastmath=True, parallel=True)(_one_each)
    except RuntimeError:  # no folder to keep it in
        return numba.njit(fastmath=True, parallel=True)(_one_each)


one_each = _compiled()
