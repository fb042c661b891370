"""A kernel of attention to keys in pages for rows of one query: every program has as many keys.

The key tiles of all rows and groups of heads stand in one line, row by row, and each program takes
a run of it. Where a row of a group lies in several runs, whichever program ends last puts its parts
together. So short rows beside long ones leave no program waiting, and the programs that run at the
same time read the same keys' lines: those of all groups lie side by side.

Letters as in `kernels`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tutti.accelerator.cuda.early_launch import wait
from tutti.accelerator.cuda.pages.kernels import _meet, _sunk


@triton.jit
def _first_tile(length, window, N: tl.constexpr, WINDOW: tl.constexpr):
    """Return a row's first key that its query sees, and the tile in which it lies."""
    first = length * 0
    if WINDOW == 1:
        first = tl.maximum(length - window, 0)
    if WINDOW == 2:
        first = (length - 1) // window * window
    return first, first // N


@triton.jit
def _joined(
    parts, sums, first, last, inside, M: tl.constexpr, E: tl.constexpr, WIDE_E: tl.constexpr
):
    """Return highest scores, sums and what was collected of all programs from first to last."""
    m, e = tl.arange(0, M), tl.arange(0, WIDE_E)
    written = inside[:, None] & (e < E)[None, :]
    most = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    collected = tl.zeros((M, WIDE_E), tl.float32)
    for program in range(first, last + 1):
        line = (2 * program + (program == first).to(tl.int32)) * M + m
        theirs = tl.load(sums + 2 * line, mask=inside, other=float("-inf"))
        new = tl.maximum(most, theirs)
        safe = tl.where(new == float("-inf"), 0.0, new)
        shrink, weight = tl.exp2(most - safe), tl.exp2(theirs - safe)
        own = tl.load(sums + 2 * line + 1, mask=inside, other=0.0)
        part = tl.load(parts + line[:, None] * E + e[None, :], mask=written, other=0.0)
        total = total * shrink + own * weight
        collected = collected * shrink[:, None] + part * weight[:, None]
        most = new
    return most, total, collected


@triton.jit
def _leave(
    out, parts, sums, counter, sinks, collected, most, total, place, begins, ends, line, head_m,
    inside, M: tl.constexpr, E: tl.constexpr, WIDE_E: tl.constexpr, HAS_SINK: tl.constexpr,
):  # fmt: skip
    """Write the outputs of a row of a group; where several programs have parts, the last does.

    A program leaves its part at a place of its own: it has two, for where it begins and ends.
    """
    e = tl.arange(0, WIDE_E)
    written = inside[:, None] & (e < E)[None, :]
    complete = begins == ends
    if not complete:
        kept = place * M + tl.arange(0, M)
        tl.store(parts + kept[:, None] * E + e[None, :], collected, mask=written)
        tl.store(sums + 2 * kept, most, mask=inside)
        tl.store(sums + 2 * kept + 1, total, mask=inside)
        tl.debug_barrier()
        complete = tl.atomic_add(counter, 1, sem="acq_rel") == ends - begins
        if complete:
            tl.store(counter, 0)  # as the next call wants to find it
            most, total, collected = _joined(parts, sums, begins, ends, inside, M, E, WIDE_E)
    if complete:
        mean = _sunk(collected, most, total, sinks, head_m, inside, HAS_SINK)
        y = mean.to(out.dtype.element_ty)
        tl.store(out + line.to(tl.int64)[:, None] * E + e[None, :], y, mask=written)


@triton.jit(do_not_specialize=["table_row", "num_rows", "num_tokens"])
def attend_evenly(
    q, keys, values, key_scales, value_scales, out, parts, sums, counters, starts, lengths, tables,
    sinks, slopes, q_row, q_head, k_page, k_place, k_head, v_page, v_place, v_head, table_row,
    num_rows, num_tokens, scale, cap, window, factor,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, M: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    WIDE_D: tl.constexpr, WIDE_E: tl.constexpr, N: tl.constexpr, SIZE: tl.constexpr,
    ROWS: tl.constexpr, ZERO: tl.constexpr, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_SINK: tl.constexpr, HAS_SLOPE: tl.constexpr, ROUNDED: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Write the outputs of rows of one query (T, H, E)."""
    me, programs = tl.program_id(0), tl.num_programs(0)
    SHARE: tl.constexpr = HEADS // GROUPS
    r, m, d, e = tl.arange(0, ROWS), tl.arange(0, M), tl.arange(0, WIDE_D), tl.arange(0, WIDE_E)
    # written before the step: no kernel of it is waited for
    begin_r = tl.load(starts + r, mask=r < num_rows, other=0)
    queries_r = tl.load(starts + r + 1, mask=r < num_rows, other=0) - begin_r
    length_r = tl.load(lengths + r, mask=r < num_rows, other=0)
    tiles_r = tl.cdiv(length_r, N) - _first_tile(length_r, window, N, WINDOW)[1]
    tiles_r = tl.where(queries_r == 1, tiles_r, 0)
    ends_r = tl.cumsum(tiles_r, 0) * GROUPS
    whole = tl.sum(tiles_r, 0) * GROUPS
    each = tl.maximum(tl.cdiv(whole, programs), 1)
    inside = m < SHARE
    written = inside[:, None] & (e < E)[None, :]
    wait(EARLY)
    if ZERO:  # tokens that belong to nobody, behind the last row
        for nobody in range(tl.load(starts + num_rows) + me, num_tokens, programs):
            for other in range(GROUPS):
                blank = (nobody * HEADS + other * SHARE + m).to(tl.int64)
                zeros = tl.zeros((M, WIDE_E), out.dtype.element_ty)
                tl.store(out + blank[:, None] * E + e[None, :], zeros, mask=written)
    at = me * each
    stop = tl.minimum(at + each, whole)
    while at < stop:
        row = tl.sum((ends_r <= at).to(tl.int32), 0)
        own_r = r == row
        tiles = tl.sum(tl.where(own_r, tiles_r, 0), 0)
        base = tl.sum(tl.where(own_r, ends_r, 0), 0) - tiles * GROUPS
        length, token = tl.load(lengths + row), tl.load(starts + row).to(tl.int64)
        group = (at - base) // tiles
        base += group * tiles
        until = tl.minimum(stop, base + tiles)
        first, tile = _first_tile(length, window, N, WINDOW)
        head_m = group * SHARE + m
        q_at = q + token * q_row + head_m[:, None] * q_head + d[None, :]
        q_md = tl.load(q_at, mask=inside[:, None] & (d < D)[None, :], other=0.0)
        most, total = tl.full((M,), float("-inf"), tl.float32), tl.zeros((M,), tl.float32)
        slope_m = most
        if HAS_SLOPE:
            slope_m = tl.load(slopes + head_m, mask=inside, other=0.0).to(tl.float32)
        collected = tl.zeros((M, WIDE_E), tl.float32)
        own = m * 0 + length - 1
        table = tables + row.to(tl.int64) * table_row
        own_keys, own_values = key_scales, value_scales
        if SCALED:
            own_keys += group
            own_values += group
        for start in range((tile + at - base) * N, (tile + until - base) * N, N):
            most, total, collected = _meet(
                q_md, keys + group * k_head, values + group * v_head, own_keys, own_values, table,
                start, first, length, own, slope_m, most, total, collected, k_page, k_place, v_page,
                v_place, GROUPS, scale, cap, window, factor, D, E, WIDE_D, WIDE_E, N, SIZE, False,
                WINDOW, HAS_CAP, HAS_SLOPE, ROUNDED, PRECISION, SCALED,
            )  # fmt: skip
        begins, ends = base // each, (base + tiles - 1) // each
        _leave(out, parts, sums, counters + row * GROUPS + group, sinks, collected, most, total,
               2 * me + (at == base).to(tl.int32), begins, ends, token * HEADS + head_m, head_m,
               inside, M, E, WIDE_E, HAS_SINK)  # fmt: skip
        at = until
