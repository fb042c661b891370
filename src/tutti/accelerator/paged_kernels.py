"""Attention of one token to keys in pages, compiled for the host: nothing is gathered or padded."""

from __future__ import annotations

from typing import Any

import numba
import numba.extending
import numpy as np

from tutti.accelerator.host.softening import fast, soften


def _dots(scores: Any, own: Any, block: Any, group: int, low: int, high: int) -> None:
    """Fill in a query's products with the keys at places `low` to `high` of a page."""
    at = low
    while at + 3 < high:
        a, b, c, d = (
            block[at, group],
            block[at + 1, group],
            block[at + 2, group],
            block[at + 3, group],
        )
        to_a = to_b = to_c = to_d = own[0] * 0
        for i in range(len(own)):
            to_a += own[i] * a[i]
            to_b += own[i] * b[i]
            to_c += own[i] * c[i]
            to_d += own[i] * d[i]
        scores[at - low], scores[at - low + 1] = to_a, to_b
        scores[at - low + 2], scores[at - low + 3] = to_c, to_d
        at += 4
    while at < high:
        line = block[at, group]
        total = own[0] * 0
        for i in range(len(own)):
            total += own[i] * line[i]
        scores[at - low] = total
        at += 1


def _dots_of_two(
    scores: Any, first: int, q: Any, head: int, block: Any, group: int, low: int, high: int
) -> None:
    """Fill in the products of two queries that share keys, four keys at a time."""
    zero = q.dtype.type(0)
    at = low
    while at + 3 < high:
        one_a, one_b, one_c, one_d = zero, zero, zero, zero
        two_a, two_b, two_c, two_d = zero, zero, zero, zero
        for i in range(q.shape[1]):
            one, two = q[head, i], q[head + 1, i]
            a, b = block[at, group, i], block[at + 1, group, i]
            c, d = block[at + 2, group, i], block[at + 3, group, i]
            one_a += one * a
            one_b += one * b
            one_c += one * c
            one_d += one * d
            two_a += two * a
            two_b += two * b
            two_c += two * c
            two_d += two * d
        to = first + at - low
        scores[0, to], scores[0, to + 1] = one_a, one_b
        scores[0, to + 2], scores[0, to + 3] = one_c, one_d
        scores[1, to], scores[1, to + 1] = two_a, two_b
        scores[1, to + 2], scores[1, to + 3] = two_c, two_d
        at += 4
    while at < high:
        for n in range(2):
            one_a = zero
            for i in range(q.shape[1]):
                one_a += q[head + n, i] * block[at, group, i]
            scores[n, first + at - low] = one_a
        at += 1


def _dots_of_three(
    scores: Any, first: int, q: Any, head: int, block: Any, group: int, low: int, high: int
) -> None:
    """Fill in the products of three queries that share keys, four keys at a time."""
    zero = q.dtype.type(0)
    q_a, q_b, q_c = q[head], q[head + 1], q[head + 2]
    at = low
    while at + 3 < high:
        k_0, k_1 = block[at, group], block[at + 1, group]
        k_2, k_3 = block[at + 2, group], block[at + 3, group]
        a_0 = a_1 = a_2 = a_3 = b_0 = b_1 = b_2 = b_3 = c_0 = c_1 = c_2 = c_3 = zero
        for i in range(q.shape[1]):
            a, b, c = q_a[i], q_b[i], q_c[i]
            a_0, b_0, c_0 = a_0 + a * k_0[i], b_0 + b * k_0[i], c_0 + c * k_0[i]
            a_1, b_1, c_1 = a_1 + a * k_1[i], b_1 + b * k_1[i], c_1 + c * k_1[i]
            a_2, b_2, c_2 = a_2 + a * k_2[i], b_2 + b * k_2[i], c_2 + c * k_2[i]
            a_3, b_3, c_3 = a_3 + a * k_3[i], b_3 + b * k_3[i], c_3 + c * k_3[i]
        to = first + at - low
        scores[0, to], scores[0, to + 1], scores[0, to + 2], scores[0, to + 3] = a_0, a_1, a_2, a_3
        scores[1, to], scores[1, to + 1], scores[1, to + 2], scores[1, to + 3] = b_0, b_1, b_2, b_3
        scores[2, to], scores[2, to + 1], scores[2, to + 2], scores[2, to + 3] = c_0, c_1, c_2, c_3
        at += 4
    while at < high:
        a_0 = b_0 = c_0 = zero
        for i in range(q.shape[1]):
            k = block[at, group, i]
            a_0, b_0, c_0 = a_0 + q_a[i] * k, b_0 + q_b[i] * k, c_0 + q_c[i] * k
        to = first + at - low
        scores[0, to], scores[1, to], scores[2, to] = a_0, b_0, c_0
        at += 1


def _all_dots(
    scores: Any, first: int, q: Any, head: int, block: Any, group: int, low: int, high: int
) -> None:
    """Fill in the products of all queries that share keys: each key is read for three at once."""
    n = 0
    while n < len(scores):
        left = len(scores) - n
        if left == 1:
            line = scores[n, first : first + high - low]
            dots(line, q[head + n], block, group, low, high)
            n += 1
        elif left in (2, 4):
            dots_of_two(scores[n:], first, q, head + n, block, group, low, high)
            n += 2
        else:
            dots_of_three(scores[n:], first, q, head + n, block, group, low, high)
            n += 3


def _weigh(total: Any, weights: Any, block: Any, group: int, low: int, high: int) -> None:
    """Add the values at places `low` to `high` of a page, each times its weight."""
    at = low
    while at + 3 < high:
        a, b, c, d = (
            block[at, group],
            block[at + 1, group],
            block[at + 2, group],
            block[at + 3, group],
        )
        of_a, of_b = weights[at - low], weights[at - low + 1]
        of_c, of_d = weights[at - low + 2], weights[at - low + 3]
        for i in range(len(total)):
            total[i] += (of_a * a[i] + of_b * b[i]) + (of_c * c[i] + of_d * d[i])
        at += 4
    while at < high:
        line, weight = block[at, group], weights[at - low]
        for i in range(len(total)):
            total[i] += weight * line[i]
        at += 1


def _weigh_for_three(
    total: Any, head: int, weights: Any, first: int, block: Any, group: int, low: int, high: int
) -> None:
    """Add the values at places of a page for three queries that share them: each is read once."""
    of_a, of_b, of_c = total[head], total[head + 1], total[head + 2]
    at = low
    while at + 3 < high:
        v_0, v_1 = block[at, group], block[at + 1, group]
        v_2, v_3 = block[at + 2, group], block[at + 3, group]
        to = first + at - low
        one, two, three = weights[0], weights[1], weights[2]
        a_0, a_1, a_2, a_3 = one[to], one[to + 1], one[to + 2], one[to + 3]
        b_0, b_1, b_2, b_3 = two[to], two[to + 1], two[to + 2], two[to + 3]
        c_0, c_1, c_2, c_3 = three[to], three[to + 1], three[to + 2], three[to + 3]
        for i in range(total.shape[1]):
            w, x, y, z = v_0[i], v_1[i], v_2[i], v_3[i]
            of_a[i] += (a_0 * w + a_1 * x) + (a_2 * y + a_3 * z)
            of_b[i] += (b_0 * w + b_1 * x) + (b_2 * y + b_3 * z)
            of_c[i] += (c_0 * w + c_1 * x) + (c_2 * y + c_3 * z)
        at += 4
    while at < high:
        line, to = block[at, group], first + at - low
        a, b, c = weights[0, to], weights[1, to], weights[2, to]
        for i in range(total.shape[1]):
            of_a[i] += a * line[i]
            of_b[i] += b * line[i]
            of_c[i] += c * line[i]
        at += 1


def _all_weighed(
    total: Any, head: int, weights: Any, first: int, block: Any, group: int, low: int, high: int
) -> None:
    """Add the values of a page to all queries that share them."""
    n = 0
    while n < len(weights):
        if len(weights) - n >= 3:
            weigh_for_three(total, head + n, weights[n:], first, block, group, low, high)
            n += 3
        else:
            line = weights[n, first : first + high - low]
            weigh(total[head + n], line, block, group, low, high)
            n += 1


def _opened(block: Any, group: int, low: int, high: int, bits: Any) -> Any:
    """Return a page in which a group's places `low` to `high` are wide numbers.

    The bits of bfloat16 are the upper half of those of float32.
    """
    for at in range(low, high):
        for i in range(block.shape[2]):
            bits[at, 0, i] = np.uint32(block[at, group, i]) << np.uint32(16)
    return bits.view(np.float32)


def _page(block, group, low, high, bits):  # type: ignore[no-untyped-def]  # numba compares
    """Return the page to read, and its group's place there; chosen when types are known."""
    raise NotImplementedError


@numba.extending.overload(_page)
def _page_by_type(block, group, low, high, bits):  # type: ignore[no-untyped-def]
    """Return the function for a page's type, of the same names: numba wants them so."""
    del group, low, high, bits
    if block.dtype == numba.types.uint16:
        return lambda block, group, low, high, bits: (opened(block, group, low, high, bits), 0)
    return lambda block, group, low, high, bits: (block, group)  # noqa: ARG005


def _one_each(
    out: Any,  # (T, H, E)
    q: Any,  # (T, H, D)
    key_pages: Any,  # (P, size, G, D), as wide as q, or the bits of bfloat16
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
    shares: bool,  # whether queries of a group read their keys together
    together: int,  # groups of a row that one thread goes through, page by page
) -> None:
    """Fill in the attention of rows of one token.

    Where queries read keys together, the last bits hang on where pages end.
    """
    groups, size = key_pages.shape[2], key_pages.shape[1]
    share, parts = q.shape[1] // groups, groups // together
    for item in numba.prange(len(rows) * parts):
        row, group_0 = rows[item // parts], item % parts * together
        at, first, last = starts[row], firsts[row], keys[row]
        scores = np.empty((together * share, last - first), q.dtype)
        powers = np.empty(last - first, q.dtype)
        key_bits = np.empty((size, 1, key_pages.shape[3]), np.uint32)
        value_bits = np.empty((size, 1, value_pages.shape[3]), np.uint32)
        pages = range(first // size, (last + size - 1) // size)
        for page in pages:
            low, high = max(first, page * size), min(last, page * size + size)
            stored, to = key_pages[tables[row, page]], page * size
            for n in range(together):
                head, own = (group_0 + n) * share, scores[n * share : (n + 1) * share]
                block, part = _page(stored, group_0 + n, low - to, high - to, key_bits)
                if shares:
                    all_dots(own, low - first, q[at], head, block, part, low - to, high - to)
                    continue
                for m in range(share):
                    line = own[m, low - first : high - first]
                    dots(line, q[at, head + m], block, part, low - to, high - to)
        for n in range(together * share):
            head = group_0 * share + n
            soften(scores[n], powers, head, first, scale, soft_cap, sinks, slopes)
            out[at, head] = 0.0
        for page in pages:
            low, high = max(first, page * size), min(last, page * size + size)
            stored, to = value_pages[tables[row, page]], page * size
            for n in range(together):
                head, own = (group_0 + n) * share, scores[n * share : (n + 1) * share]
                block, part = _page(stored, group_0 + n, low - to, high - to, value_bits)
                if shares:
                    all_weighed(out[at], head, own, low - first, block, part, low - to, high - to)
                    continue
                for m in range(share):
                    line = own[m, low - first : high - first]
                    weigh(out[at, head + m], line, block, part, low - to, high - to)


dots, weigh = fast(_dots), fast(_weigh)
dots_of_two, dots_of_three = fast(_dots_of_two), fast(_dots_of_three)
opened = fast(_opened)
weigh_for_three = fast(_weigh_for_three)
all_dots, all_weighed = fast(_all_dots), fast(_all_weighed)
# for one thread and for several: a team of which one thread works waits for the others all the same
one_each = fast(_one_each), fast(_one_each, parallel=True)
