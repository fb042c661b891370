"""Attention of one token to keys in pages, compiled for the host: nothing is gathered or padded."""

from __future__ import annotations

from typing import Any

import numba
import numba.extending
import numpy as np

# sums in any order, fused products; what is no number stays none
FAST = {"reassoc", "contract", "arcp", "nsz"}


def _exponentials(line: Any, powers: Any) -> Any:
    """Put e to the power of numbers that are at most 0 in their place; return the sum.

    In single precision by a polynomial and a power of two, which the compiler can make vectors of:
    e^x = 2^n · e^f with |f| ≤ ½ ln 2, where six terms leave 1e-7.
    """
    total = line[0] * 0.0
    if line.itemsize != 4:
        for i in range(len(line)):
            line[i] = np.exp(line[i])
            total += line[i]
        return total
    exponents = powers.view(np.int32)
    for i in range(len(line)):
        twos = max(line[i], np.float32(-87.0)) * np.float32(1.4426950408889634)
        whole = np.floor(twos + np.float32(0.5))
        f = (twos - whole) * np.float32(0.6931471805599453)
        p = f * np.float32(1 / 720) + np.float32(1 / 120)
        p = p * f + np.float32(1 / 24)
        p = p * f + np.float32(1 / 6)
        p = p * f + np.float32(0.5)
        p = p * f + np.float32(1.0)
        line[i] = p * f + np.float32(1.0)
        exponents[i] = (np.int32(whole) + np.int32(127)) << np.int32(23)
    for i in range(len(line)):
        line[i] *= powers[i]
        total += line[i]
    return total


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
    """Fill in the products of three queries that share keys, two keys at a time."""
    zero = q.dtype.type(0)
    at = low
    while at + 1 < high:
        one, two, three = zero, zero, zero
        one_b, two_b, three_b = zero, zero, zero
        for i in range(q.shape[1]):
            a, b = block[at, group, i], block[at + 1, group, i]
            one += q[head, i] * a
            one_b += q[head, i] * b
            two += q[head + 1, i] * a
            two_b += q[head + 1, i] * b
            three += q[head + 2, i] * a
            three_b += q[head + 2, i] * b
        to = first + at - low
        scores[0, to], scores[1, to], scores[2, to] = one, two, three
        scores[0, to + 1], scores[1, to + 1], scores[2, to + 1] = one_b, two_b, three_b
        at += 2
    if at < high:
        for n in range(3):
            one = zero
            for i in range(q.shape[1]):
                one += q[head + n, i] * block[at, group, i]
            scores[n, first + at - low] = one


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


def _soften(
    line: Any,
    powers: Any,
    head: int,
    first: int,
    scale: float,
    soft_cap: float,
    sinks: Any,
    slopes: Any,
) -> None:
    """Turn a query's products with the keys from `first` on into weights."""
    for key in range(len(line)):
        line[key] *= scale
    if soft_cap != 0.0:
        for key in range(len(line)):
            line[key] = soft_cap * np.tanh(line[key] / soft_cap)
    if len(slopes):
        for key in range(len(line)):
            line[key] += slopes[head] * (key + first)
    largest = line.max()
    if len(sinks):
        largest = max(largest, sinks[head])
    check = largest * 0
    for key in range(len(line)):
        line[key] -= largest
        check += line[key]
    whole = exponentials(line, powers)
    if check != check:  # a score that is no number: neither is what comes of it
        whole = check
    if len(sinks):
        whole += np.exp(sinks[head] - largest)
    for key in range(len(line)):
        line[key] /= whole


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
) -> None:
    """Fill in the attention of rows of one token.

    Where queries read keys together, the order of sums, and so the last bits, hangs on where pages
    end.
    """
    heads, groups, size = q.shape[1], key_pages.shape[2], key_pages.shape[1]
    share = heads // groups
    for item in numba.prange(len(rows) * groups):
        row, group = rows[item // groups], item % groups
        at, first, last = starts[row], firsts[row], keys[row]
        scores = np.empty((share, last - first), q.dtype)
        powers = np.empty(last - first, q.dtype)
        key_bits = np.empty((size, 1, key_pages.shape[3]), np.uint32)
        value_bits = np.empty((size, 1, value_pages.shape[3]), np.uint32)
        pages = range(first // size, (last + size - 1) // size)
        for page in pages:
            low, high = max(first, page * size), min(last, page * size + size)
            stored, to = key_pages[tables[row, page]], page * size
            block, part = _page(stored, group, low - to, high - to, key_bits)
            if shares:
                all_dots(
                    scores, low - first, q[at], group * share, block, part, low - to, high - to
                )
                continue
            for n in range(share):
                line, own = scores[n, low - first : high - first], q[at, group * share + n]
                dots(line, own, block, part, low - to, high - to)
        for n in range(share):
            head = group * share + n
            soften(scores[n], powers, head, first, scale, soft_cap, sinks, slopes)
            out[at, head] = 0.0
        for page in pages:
            low, high = max(first, page * size), min(last, page * size + size)
            stored, to = value_pages[tables[row, page]], page * size
            block, part = _page(stored, group, low - to, high - to, value_bits)
            for n in range(share):
                line, own = scores[n, low - first : high - first], out[at, group * share + n]
                weigh(own, line, block, part, low - to, high - to)


def _compiled(function: Any, *, parallel: bool = False) -> Any:
    """Return a compiled function, kept on disk where there is a place for it."""
    options: dict[str, Any] = {"fastmath": FAST, "parallel": parallel, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no folder to keep it in
        return numba.njit(**options)(function)


exponentials, dots, weigh = _compiled(_exponentials), _compiled(_dots), _compiled(_weigh)
dots_of_two, dots_of_three = _compiled(_dots_of_two), _compiled(_dots_of_three)
opened = _compiled(_opened)
all_dots, soften = _compiled(_all_dots), _compiled(_soften)
# for one thread and for several: a team of which one thread works waits for the others all the same
one_each = _compiled(_one_each), _compiled(_one_each, parallel=True)
