"""Kernels of attention to keys in pages.

A program takes a tile: some queries of one row and all query heads that share a key head. Which
rows there are, how long they are and where their pages lie is read on the device, so that a graph
holds for every step of its size. The keys of rows of one query are cut into runs (splits) that
other programs take; whichever of them ends last puts the results together.

Letters: M queries × heads of a tile, N keys of a tile, D width of queries and keys, E of values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tutti.accelerator.cuda.early_launch import wait

LOG2E = tl.constexpr(1.4426950408889634)
ONE_TILE, TILES = tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _tanh(x):
    return 2.0 / (1.0 + tl.exp2(-2.0 * LOG2E * x)) - 1.0


@triton.jit
def _row_of(tile, starts, num_rows, first, QUERIES: tl.constexpr):
    """Return the row of a tile, and the row's first tile: each has one more than it may need."""
    low, high, base = first, num_rows - 1, tl.load(starts + first)
    while low < high:
        middle = (low + high + 1) // 2
        if (tl.load(starts + middle) - base) // QUERIES + middle - first <= tile:
            low = middle
        else:
            high = middle - 1
    return low, (tl.load(starts + low) - base) // QUERIES + low - first


@triton.jit
def _place(
    tile, starts, num_rows, first_long,
    QUERIES: tl.constexpr, SINGLE: tl.constexpr, SORTED: tl.constexpr,
):  # fmt: skip
    """Return a tile's row, its first query in it, where the row begins, and its queries."""
    if SINGLE:
        row, at = tile, 0
    else:
        first = 0
        if SORTED:
            first = min(tl.load(first_long), num_rows - 1)
        row, own = _row_of(tile, starts, num_rows, first, QUERIES)
        at = (tile - own) * QUERIES
    begin = tl.load(starts + row)
    return row, at, begin, tl.load(starts + row + 1) - begin


@triton.jit
def _keys_seen(
    length, queries, at, window, QUERIES: tl.constexpr, WINDOW: tl.constexpr
):  # fmt: skip
    """Return from where to where keys lie that a tile's queries see."""
    first = length - queries + at
    low, high = 0, length - queries + min(at + QUERIES, queries)
    if WINDOW == 1:
        low = max(low, first - window + 1)
    if WINDOW == 2:
        low = first // window * window
    return low, high


@triton.jit
def _split_of(low, high, split, LEAST: tl.constexpr, SPLITS: tl.constexpr):
    """Return a split's keys, and how many splits of the row have any."""
    low = low // LEAST * LEAST  # keys before the first that is seen are left out one by one
    each = tl.cdiv(tl.cdiv(high - low, SPLITS), LEAST) * LEAST
    used = tl.cdiv(high - low, each)
    low += split * each
    return low, min(high, low + each), used


@triton.jit
def _seen(own, other, known, window, WINDOW: tl.constexpr):
    """Return which keys queries see, by their positions."""
    seen = known & (other <= own)
    if WINDOW == 1:
        seen = seen & (own - other < window)
    if WINDOW == 2:
        seen = seen & (own // window == other // window)
    return seen


@triton.jit
def _bias(slope_m, other, factor, ROUNDED: tl.constexpr):
    """Return what ALiBi adds to the scores of keys."""
    if ROUNDED:
        near = other.to(tl.float32).to(tl.bfloat16).to(tl.float32)
        bias = slope_m.to(tl.bfloat16).to(tl.float32)[:, None] * near[None, :]
        return bias.to(tl.bfloat16).to(tl.float32) * factor
    return slope_m[:, None] * other.to(tl.float32)[None, :] * factor


@triton.jit
def _changed(
    s, own, other, known, slope_m, cap, window, factor,
    HAS_CAP: tl.constexpr, HAS_SLOPE: tl.constexpr, ROUNDED: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Return scores as the model changes them, for exponentials of two; −∞ of keys not seen."""
    if HAS_CAP:
        s = cap * _tanh(s / cap)
    if HAS_SLOPE:
        s += _bias(slope_m, other, factor, ROUNDED)
    seen = _seen(own[:, None], other[None, :], known[None, :], window, WINDOW)
    return tl.where(seen, s * LOG2E, float("-inf"))


@triton.jit
def _weighed(s, most, total):
    """Return the weights of new scores, by how much old ones shrink, and maximum and sum of all."""
    new = tl.maximum(most, tl.max(s, 1))
    base = tl.where(new == float("-inf"), 0.0, new)
    p = tl.exp2(s - base[:, None])
    shrink = tl.exp2(most - base)
    return p, shrink, new, total * shrink + tl.sum(p, 1)


@triton.jit
def _is_left_out(queries, at, SINGLE: tl.constexpr):
    """Tell whether a tile has nothing to do: its row is of the other kind, or too short."""
    left_out = queries != 1
    if not SINGLE:
        left_out = (queries <= 1) | (at >= queries)
    return left_out


@triton.jit
def _blank(
    out, starts, row, queries, split, head_m, known, num_rows, num_tokens,
    HEADS: tl.constexpr, WIDE_SHARE: tl.constexpr, M: tl.constexpr, E: tl.constexpr,
    WIDE_E: tl.constexpr,
):  # fmt: skip
    """Write zeros for a token that belongs to nobody.

    In a step of single tokens, behind the last row, token and row have one number.
    """
    e = tl.arange(0, WIDE_E)
    wanted = (queries == 0) & (row >= tl.load(starts + num_rows)) & (row < num_tokens)
    line = (row * HEADS + head_m).to(tl.int64)
    known = known & (tl.arange(0, M) < WIDE_SHARE) & wanted & (split == 0)
    zeros = tl.zeros((M, WIDE_E), out.dtype.element_ty)
    tl.store(out + line[:, None] * E + e[None, :], zeros, mask=known[:, None] & (e < E)[None, :])


@triton.jit
def _sunk(collected, most, total, sinks, head_m, inside, HAS_SINK: tl.constexpr):
    """Return the mean of what was collected, with a sink's weight beside the keys'."""
    if HAS_SINK:
        sink = tl.load(sinks + head_m, mask=inside, other=0.0).to(tl.float32) * LOG2E
        new = tl.maximum(most, sink)
        shrink = tl.exp2(most - new)
        total = total * shrink + tl.exp2(sink - new)
        collected = collected * shrink[:, None]
    return collected / tl.where(total > 0.0, total, 1.0)[:, None]


@triton.jit
def _write(
    out, parts, sums, counters, sinks, collected, most, total, line, kept, head_m, split, used,
    inside, E: tl.constexpr, WIDE_E: tl.constexpr, SPLITS: tl.constexpr, HAS_SINK: tl.constexpr,
):  # fmt: skip
    """Write a tile's outputs; of several splits, the last to come joins them all.

    Splits leave what they have at the lines `kept`.
    """
    e = tl.arange(0, WIDE_E)
    written = inside[:, None] & (e < E)[None, :]
    if SPLITS > 1:  # noqa: SIM102  (known when the kernel is compiled; the next is not)
        if used > 1:
            lines = kept * SPLITS
            tl.store(parts + (lines + split)[:, None] * E + e[None, :], collected, mask=written)
            tl.store(sums + 2 * (lines + split), most, mask=inside)
            tl.store(sums + 2 * (lines + split) + 1, total, mask=inside)
            tl.debug_barrier()
            if tl.atomic_add(counters, 1, sem="acq_rel") < used - 1:
                return
            tl.store(counters, 0)  # as the next call wants to find it
            base, total, collected = most, tl.zeros_like(total), tl.zeros_like(collected)
            for other in range(used):
                base = tl.maximum(
                    base, tl.load(sums + 2 * (lines + other), mask=inside, other=float("-inf"))
                )
            safe = tl.where(base == float("-inf"), 0.0, base)
            for other in range(used):
                near = 2 * (lines + other)
                weight = tl.load(sums + near, mask=inside, other=float("-inf"))
                weight = tl.exp2(weight - safe)
                total += tl.load(sums + near + 1, mask=inside, other=0.0) * weight
                part = tl.load(
                    parts + (lines + other)[:, None] * E + e[None, :], mask=written, other=0.0
                )
                collected += part * weight[:, None]
            most = base
    mean = _sunk(collected, most, total, sinks, head_m, inside, HAS_SINK)
    y = mean.to(out.dtype.element_ty)
    tl.store(out + line[:, None] * E + e[None, :], y, mask=written)


@triton.jit
def _widened(x, dtype: tl.constexpr, CODES: tl.constexpr):
    """Return numbers of pages as the products take them; no code of 8 bits is rounded."""
    return x.to(tl.float32).to(dtype) if CODES else x.to(dtype)


@triton.jit
def _meet(
    q_md, keys, values, key_scales, value_scales, table, start, first, high, own, slope_m, most,
    total, collected, k_page, k_place, v_page, v_place, groups, scale, cap, window, factor,
    D: tl.constexpr, E: tl.constexpr, WIDE_D: tl.constexpr, WIDE_E: tl.constexpr, N: tl.constexpr,
    SIZE: tl.constexpr, ALL: tl.constexpr, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_SLOPE: tl.constexpr, ROUNDED: tl.constexpr, PRECISION: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """Return maxima, sums and what is collected after a tile of keys; ALL queries may see them.

    SCALED: keys and values are codes of 8 bits; what one stands for is it times its place's scale.
    """
    d, e, other = tl.arange(0, WIDE_D), tl.arange(0, WIDE_E), start + tl.arange(0, N)
    known = (other >= first) & (other < high)
    place = other % SIZE
    if SIZE % N == 0:  # all in one page
        page = tl.load(table + start // SIZE).to(tl.int64)
    elif ALL:
        page = tl.load(table + other // SIZE).to(tl.int64)
    else:
        page = tl.load(table + other // SIZE, mask=known, other=0).to(tl.int64)
    k_at = keys + (page * k_page + place * k_place)[None, :] + d[:, None]
    v_at = values + (page * v_page + place * v_place)[:, None] + e[None, :]
    if ALL and D == WIDE_D:
        k_dn = _widened(tl.load(k_at), q_md.dtype, SCALED)
    else:
        k_dn = tl.load(k_at, mask=known[None, :] & (d < D)[:, None], other=0.0)
        k_dn = _widened(k_dn, q_md.dtype, SCALED)
    s = tl.dot(q_md, k_dn, input_precision=PRECISION)
    line = (page * SIZE + place) * groups
    if SCALED:
        s *= tl.load(key_scales + line, mask=known, other=0.0)[None, :]
    if ALL and not HAS_CAP and not HAS_SLOPE:
        s *= scale * LOG2E
    elif ALL:
        s *= scale
        if HAS_CAP:
            s = cap * _tanh(s / cap)
        if HAS_SLOPE:
            s += _bias(slope_m, other, factor, ROUNDED)
        s *= LOG2E
    else:
        s = _changed(s * scale, own, other, known, slope_m, cap, window, factor, HAS_CAP,
                     HAS_SLOPE, ROUNDED, WINDOW)  # fmt: skip
    p, shrink, most, total = _weighed(s, most, total)
    if ALL and E == WIDE_E:
        v_ne = _widened(tl.load(v_at), q_md.dtype, SCALED)
    else:
        v_ne = tl.load(v_at, mask=known[:, None] & (e < E)[None, :], other=0.0)
        v_ne = _widened(v_ne, q_md.dtype, SCALED)
    if SCALED:
        scale_n = tl.load(value_scales + line, mask=known, other=0.0)
        if q_md.dtype == tl.float16:  # weights times scales are too small for it
            v_ne = (v_ne.to(tl.float32) * scale_n[:, None]).to(q_md.dtype)
        else:
            p *= scale_n[None, :]
    collected = collected * shrink[:, None]
    collected = tl.dot(p.to(v_ne.dtype), v_ne, collected, input_precision=PRECISION)
    return most, total, collected


# FIXED: of any row, a query's keys always in the same tiles; each row one tile, or as many as it
# has queries for (`ONE_TILE`, `TILES`).
@triton.jit(do_not_specialize=["table_row", "num_rows"])
def attend(
    q, keys, values, key_scales, value_scales, out, parts, sums, counters, starts, lengths,
    first_long, tables, sinks, slopes, q_row, q_head, k_page, k_place, k_head, v_page, v_place,
    v_head, table_row, num_rows, scale, cap, window, factor,
    HEADS: tl.constexpr, SHARE: tl.constexpr, WIDE_SHARE: tl.constexpr, QUERIES: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, WIDE_D: tl.constexpr, WIDE_E: tl.constexpr, N: tl.constexpr,
    SIZE: tl.constexpr, LEAST: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_SINK: tl.constexpr, HAS_SLOPE: tl.constexpr, ROUNDED: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr, SORTED: tl.constexpr, SCALED: tl.constexpr,
    FIXED: tl.constexpr,
):  # fmt: skip
    """Write the outputs of a tile of a row of several queries (T, H, E)."""
    tile, group, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    M: tl.constexpr = QUERIES * WIDE_SHARE
    m, d = tl.arange(0, M), tl.arange(0, WIDE_D)
    share = m % WIDE_SHARE
    head_m = group * SHARE + share
    row, at, begin, queries = _place(tile, starts, num_rows, first_long, QUERIES,
                                     FIXED == ONE_TILE, SORTED)  # fmt: skip
    length = tl.load(lengths + row)  # written before the step: no kernel of it is waited for
    wait(EARLY)
    if FIXED == 0:  # noqa: SIM102  (known when the kernel is compiled; the next is not)
        if queries == 1:
            return
    if at >= queries:
        return
    query_m = at + m // WIDE_SHARE
    inside = (query_m < queries) & (share < SHARE)
    own = length - queries + query_m
    first, high = _keys_seen(length, queries, at, window, QUERIES, WINDOW)
    low, used = first // N * N, 1
    if SPLITS > 1:
        low, high, used = _split_of(first, high, split, LEAST, SPLITS)
        if split >= used:
            return
    token_m = (begin + query_m).to(tl.int64)
    q_at = q + token_m[:, None] * q_row + head_m[:, None] * q_head + d[None, :]
    q_md = tl.load(q_at, mask=inside[:, None] & (d < D)[None, :], other=0.0)
    most, total = tl.full((M,), float("-inf"), tl.float32), tl.zeros((M,), tl.float32)
    slope_m = most
    if HAS_SLOPE:
        slope_m = tl.load(slopes + head_m, mask=inside, other=0.0).to(tl.float32)
    collected = tl.zeros((M, WIDE_E), tl.float32)
    table = tables + row.to(tl.int64) * table_row
    keys, values = keys + group * k_head, values + group * v_head
    groups: tl.constexpr = HEADS // SHARE
    if SCALED:
        key_scales += group
        value_scales += group
    if WINDOW == 0 and SPLITS == 1 and FIXED == 0:
        # keys before the first query are seen by all
        seen = (length - queries + at) // N * N
        for start in range(low, seen, N):
            most, total, collected = _meet(
                q_md, keys, values, key_scales, value_scales, table, start, first, high, own,
                slope_m, most, total, collected, k_page, k_place, v_page, v_place, groups, scale,
                cap, window, factor, D, E, WIDE_D, WIDE_E, N, SIZE, True, WINDOW, HAS_CAP,
                HAS_SLOPE, ROUNDED, PRECISION, SCALED,
            )  # fmt: skip
        low = seen
    for start in range(low, high, N):
        most, total, collected = _meet(
            q_md, keys, values, key_scales, value_scales, table, start, first, high, own, slope_m,
            most, total, collected, k_page, k_place, v_page, v_place, groups, scale, cap, window,
            factor, D, E, WIDE_D, WIDE_E, N, SIZE, False, WINDOW, HAS_CAP, HAS_SLOPE, ROUNDED,
            PRECISION, SCALED,
        )  # fmt: skip
    counters += tile * tl.num_programs(1) + group
    _write(out, parts, sums, counters, sinks, collected, most, total, token_m * HEADS + head_m,
           token_m * HEADS + head_m, head_m, split, used, inside, E, WIDE_E, SPLITS,
           HAS_SINK)  # fmt: skip
