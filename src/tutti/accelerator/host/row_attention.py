"""Attention of a row's one token to its pages by tiles of vectors, compiled for the host.

Widths of heads are multiples of 16, numbers are floats; keys and values may be bits of bfloat16.
The last bits hang on where pages end.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from tutti.accelerator.host.page_tiles import products_tile, values_tile
from tutti.accelerator.host.softening import soften
from tutti.accelerator.host.tiles import compiled, place_of


def _products(
    q: Any, head: int, heads: int, pages: Any, at: int, ahead: int, count: int, scores: Any,
    to: int,
) -> None:  # fmt: skip
    """Fill in products of queries that share keys with `count` keys, from place `at` of all on."""
    dim, row = q.shape[1], scores.shape[1]
    apart = pages.shape[2] * dim
    n = 0
    while n < heads:
        left, k = heads - n, 0
        own, line = place_of(q, (head + n) * dim), (head + n) * row + to
        if left == 3 or left > 4:
            while k + 3 < count:
                products_tile(own, dim, place_of(pages, at + k * apart), apart, ahead,
                              place_of(scores, line + k), row, 3, 4)  # fmt: skip
                k += 4
            while k < count:
                products_tile(own, dim, place_of(pages, at + k * apart), apart, ahead,
                              place_of(scores, line + k), row, 3, 1)  # fmt: skip
                k += 1
            n += 3
        elif left == 1:
            while k + 3 < count:
                products_tile(own, dim, place_of(pages, at + k * apart), apart, ahead,
                              place_of(scores, line + k), row, 1, 4)  # fmt: skip
                k += 4
            while k < count:
                products_tile(own, dim, place_of(pages, at + k * apart), apart, ahead,
                              place_of(scores, line + k), row, 1, 1)  # fmt: skip
                k += 1
            n += 1
        else:
            while k + 3 < count:
                products_tile(own, dim, place_of(pages, at + k * apart), apart, ahead,
                              place_of(scores, line + k), row, 2, 4)  # fmt: skip
                k += 4
            while k < count:
                products_tile(own, dim, place_of(pages, at + k * apart), apart, ahead,
                              place_of(scores, line + k), row, 2, 1)  # fmt: skip
                k += 1
            n += 2


def _values(
    scores: Any, to: int, head: int, heads: int, pages: Any, at: int, ahead: int, count: int,
    out: Any,
) -> None:  # fmt: skip
    """Add `count` values, from place `at` of all on, weighted, to queries that share them."""
    dim, row = out.shape[1], scores.shape[1]
    apart = pages.shape[2] * dim
    n = 0
    while n < heads:
        left, c = heads - n, 0
        line, own = place_of(scores, (head + n) * row + to), (head + n) * dim
        if left == 3 or left > 4:
            while c + 64 <= dim:
                values_tile(line, row, place_of(pages, at + c), apart, ahead, count,
                            place_of(out, own + c), dim, 3, 4)  # fmt: skip
                c += 64
            while c < dim:
                values_tile(line, row, place_of(pages, at + c), apart, ahead, count,
                            place_of(out, own + c), dim, 3, 1)  # fmt: skip
                c += 16
            n += 3
        elif left == 1:
            while c + 64 <= dim:
                values_tile(line, row, place_of(pages, at + c), apart, ahead, count,
                            place_of(out, own + c), dim, 1, 4)  # fmt: skip
                c += 64
            while c < dim:
                values_tile(line, row, place_of(pages, at + c), apart, ahead, count,
                            place_of(out, own + c), dim, 1, 1)  # fmt: skip
                c += 16
            n += 1
        else:
            while c + 64 <= dim:
                values_tile(line, row, place_of(pages, at + c), apart, ahead, count,
                            place_of(out, own + c), dim, 2, 4)  # fmt: skip
                c += 64
            while c < dim:
                values_tile(line, row, place_of(pages, at + c), apart, ahead, count,
                            place_of(out, own + c), dim, 2, 1)  # fmt: skip
                c += 16
            n += 2


def _to_next(table: Any, page: int, last: int, size: int) -> Any:
    """Return how many places the row's next page lies behind a page; 0: there is none."""
    if (page + 1) * size >= last:
        return 0
    return (np.int64(table[page + 1]) - np.int64(table[page])) * size


def _attend_row(
    out: Any,  # (H, E)
    q: Any,  # (H, D)
    key_pages: Any,  # (P, size, G, D)
    value_pages: Any,
    table: Any,
    first: int,  # the first key that is seen
    last: int,  # behind the last one
    begin: int,  # the first group of heads
    groups: int,  # how many
    scale: float,
    soft_cap: float,  # 0: none
    sinks: Any,  # (H,) or empty
    slopes: Any,  # (H,) or empty
) -> None:
    """Fill in the attention of one token, some groups of heads."""
    size, all_groups = key_pages.shape[1], key_pages.shape[2]
    share, wide, deep = q.shape[0] // all_groups, key_pages.shape[3], value_pages.shape[3]
    scores = np.empty((q.shape[0], last - first), np.float32)
    powers = np.empty(last - first, np.float32)
    heads = range(begin * share, (begin + groups) * share)
    pages = range(first // size, (last + size - 1) // size)
    for page in pages:
        low, high = max(first, page * size), min(last, page * size + size)
        place = (np.int64(table[page]) * size + low - page * size) * all_groups
        ahead = to_next(table, page, last, size) * all_groups
        for group in range(begin, begin + groups):
            at, to = (place + group) * wide, low - first
            products(q, group * share, share, key_pages, at, ahead * wide, high - low, scores, to)
    for head in heads:
        soften(scores[head], powers, head, first, scale, soft_cap, sinks, slopes)
        out[head] = np.float32(0)
    for page in pages:
        low, high = max(first, page * size), min(last, page * size + size)
        place = (np.int64(table[page]) * size + low - page * size) * all_groups
        ahead = to_next(table, page, last, size) * all_groups
        for group in range(begin, begin + groups):
            at, to = (place + group) * deep, low - first
            values(scores, to, group * share, share, value_pages, at, ahead * deep, high - low, out)


def _attend_rows(
    out: Any,  # (T, H, E)
    q: Any,  # (T, H, D)
    key_pages: Any,
    value_pages: Any,
    tables: Any,
    rows: Any,  # those of one query
    starts: Any,  # where each row's query stands
    keys: Any,  # of each row
    firsts: Any,  # the first key that each row's query sees
    scale: float,
    soft_cap: float,
    sinks: Any,
    slopes: Any,
    together: int,  # groups of a row that one thread goes through, page by page
) -> None:
    """Fill in the attention of rows of one token."""
    parts = key_pages.shape[2] // together
    for item in numba.prange(len(rows) * parts):
        row = rows[item // parts]
        at = starts[row]
        attend_row(
            out[at], q[at], key_pages, value_pages, tables[row], firsts[row], keys[row],
            item % parts * together, together, scale, soft_cap, sinks, slopes,
        )  # fmt: skip


to_next, products, values = compiled(_to_next), compiled(_products), compiled(_values)
attend_row = compiled(_attend_row)
attend_rows = compiled(_attend_rows), compiled(_attend_rows, parallel=True)
