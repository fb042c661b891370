"""Kernels of products of few rows, and of weights in 8 or 4 bits.

What such a product takes is the reading of its weight. `multiply_single` reads rows of the weight
straight into registers, for one row of x; `multiply_few` multiplies tiles on the matrix units, the
inner dimension cut into splits where there are too few outputs to keep the chip busy.

Letters: M rows of x, N outputs, K inputs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tutti.accelerator.cuda.early_launch import wait

PER_ROW, PER_GROUP = tl.constexpr(1), tl.constexpr(2)  # scales: of whole rows, of groups of inputs


@triton.jit
def _scaling(scales, n, known, start, scale_row, scale_height, group):
    """Return the scales (or zeros) of some outputs, in the group that an input belongs to."""
    place = n // scale_height * scale_row + start // group
    return tl.load(scales + place, mask=known, other=0.0).to(tl.float32)


@triton.jit
def _codes(place, known, inside, EVEN: tl.constexpr):
    """Return a tile of a weight; EVEN: no step goes beyond the inputs."""
    if EVEN:
        return tl.load(place, mask=known[:, None], other=0.0)
    return tl.load(place, mask=known[:, None] & inside[None, :], other=0.0)


@triton.jit
def _inputs(place, inside, EVEN: tl.constexpr):
    """Return some inputs of a row, as float32."""
    if EVEN:
        return tl.load(place).to(tl.float32)
    return tl.load(place, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _numbers(
    w, zeros, n, k, width, known, start, scale_row, scale_height, group,
    HAS_ZERO: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Return a tile of a weight (N, K) of one code a byte or wider, as float32."""
    w_nk = _codes(w + n[:, None].to(tl.int64) * width + k[None, :], known, k < width, EVEN)
    w_nk = w_nk.to(tl.float32)
    if HAS_ZERO:
        w_nk -= _scaling(zeros, n, known, start, scale_row, scale_height, group)[:, None]
    return w_nk


@triton.jit
def _halves(
    w, zeros, n, k, width, known, start, scale_row, scale_height, group,
    HAS_ZERO: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Return the even and the odd columns of a tile of 4-bit codes (N, K ÷ 2), as float32."""
    place = n[:, None].to(tl.int64) * (width // 2) + k[None, :]
    codes = _codes(w + place, known, k < width // 2, EVEN)
    low, high = (codes & 15).to(tl.float32) - 8.0, (codes >> 4).to(tl.float32) - 8.0
    if HAS_ZERO:
        zero = _scaling(zeros, n, known, start, scale_row, scale_height, group)[:, None]
        low -= zero
        high -= zero
    return low, high


@triton.jit
def multiply_single(
    x, w, scales, zeros, bias, y, out, width, scale_row, scale_height, group,
    BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, HALVES: tl.constexpr,
    SCALED: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write some outputs of one row; BK: inputs of a step, bytes where a byte has two."""
    wait(EARLY)
    n, at = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    known = n < out
    sum_nk = tl.zeros((BN, BK), tl.float32)
    step: tl.constexpr = 2 * BK if HALVES else BK
    for start in range(0, width, step):
        if HALVES:
            k = start // 2 + at
            low, high = _halves(w, zeros, n, k, width, known, start, scale_row, scale_height,
                                group, HAS_ZERO, EVEN)  # fmt: skip
            even = _inputs(x + 2 * k, k < width // 2, EVEN)
            odd = _inputs(x + 2 * k + 1, k < width // 2, EVEN)
            part = low * even[None, :] + high * odd[None, :]
        else:
            k = start + at
            w_nk = _numbers(w, zeros, n, k, width, known, start, scale_row, scale_height, group,
                            HAS_ZERO, EVEN)  # fmt: skip
            part = w_nk * _inputs(x + k, k < width, EVEN)[None, :]
        if SCALED == PER_GROUP:
            part *= _scaling(scales, n, known, start, scale_row, scale_height, group)[:, None]
        sum_nk += part
    y_n = tl.sum(sum_nk, 1)
    if SCALED == PER_ROW:
        y_n *= _scaling(scales, n, known, 0, scale_row, scale_height, group)
    if HAS_BIAS:
        y_n += tl.load(bias + n, mask=known, other=0.0).to(tl.float32)
    tl.store(y + n, y_n.to(y.dtype.element_ty), mask=known)


@triton.jit
def _joined(sum_mn, parts, counters, rows, out, m, n, SPLITS: tl.constexpr):
    """Return the sum of all splits and whether this one is the last to come."""
    split, place = tl.program_id(1), m[:, None] * out + n[None, :]
    inside = (m < rows)[:, None] & (n < out)[None, :]
    size = rows * out
    tl.store(parts + split * size + place, sum_mn, mask=inside)
    tl.debug_barrier()
    last = tl.atomic_add(counters + tl.program_id(0), 1, sem="acq_rel") == SPLITS - 1
    if last:
        tl.store(counters + tl.program_id(0), 0)  # as the next call wants to find it
        sum_mn = tl.zeros_like(sum_mn)
        for other in range(SPLITS):
            sum_mn += tl.load(parts + other * size + place, mask=inside, other=0.0)
    return sum_mn, last


@triton.jit(do_not_specialize=["rows"])
def multiply_few(
    x, w, x_scales, scales, zeros, bias, y, parts, counters, x_row, rows, out, width, scale_row,
    scale_height, group,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr,
    EVEN: tl.constexpr, HALVES: tl.constexpr, NARROW: tl.constexpr, SCALED: tl.constexpr,
    HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write some outputs of all rows; BK: inputs of a step, bytes where a byte has two."""
    wait(EARLY)
    m, n, at = tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    known, present = n < out, (m < rows)[:, None]
    sum_mn = tl.zeros((BM, BN), tl.float32)
    step: tl.constexpr = 2 * BK if HALVES else BK
    each = tl.cdiv(tl.cdiv(width, step), SPLITS) * step
    begin = tl.program_id(1) * each
    line = x + m[:, None] * x_row
    for start in range(begin, min(begin + each, width), step):
        if SCALED == PER_GROUP:
            scale = _scaling(scales, n, known, start, scale_row, scale_height, group)[:, None]
        if HALVES:
            k = start // 2 + at
            low, high = _halves(w, zeros, n, k, width, known, start, scale_row, scale_height,
                                group, HAS_ZERO, EVEN)  # fmt: skip
            if SCALED == PER_GROUP:
                low *= scale
                high *= scale
            inside = present & (k < width // 2)[None, :]
            even = tl.load(line + 2 * k[None, :], mask=inside, other=0.0)
            odd = tl.load(line + 2 * k[None, :] + 1, mask=inside, other=0.0)
            sum_mn = tl.dot(even, tl.trans(low.to(even.dtype)), sum_mn, input_precision=PRECISION)
            sum_mn = tl.dot(odd, tl.trans(high.to(odd.dtype)), sum_mn, input_precision=PRECISION)
        else:
            k = start + at
            x_mk = tl.load(line + k[None, :], mask=present & (k < width)[None, :], other=0.0)
            if SCALED == PER_GROUP or HAS_ZERO:
                w_nk = _numbers(w, zeros, n, k, width, known, start, scale_row, scale_height,
                                group, HAS_ZERO, EVEN)  # fmt: skip
                if SCALED == PER_GROUP:
                    w_nk *= scale
            else:
                place = n[:, None].to(tl.int64) * width + k[None, :]
                w_nk = _codes(w + place, known, k < width, EVEN)
            w_kn = tl.trans(w_nk.to(x_mk.dtype))
            sum_mn = tl.dot(x_mk, w_kn, sum_mn, input_precision=PRECISION)
    last = True
    if SPLITS > 1:
        sum_mn, last = _joined(sum_mn, parts, counters, rows, out, m, n, SPLITS)
    if SCALED == PER_ROW:
        sum_mn *= _scaling(scales, n, known, 0, scale_row, scale_height, group)[None, :]
    if NARROW:
        sum_mn *= tl.load(x_scales + m, mask=m < rows, other=0.0)[:, None]
    if HAS_BIAS:
        sum_mn += tl.load(bias + n, mask=known, other=0.0).to(tl.float32)[None, :]
    tl.store(y + m[:, None] * out + n[None, :], sum_mn.to(y.dtype.element_ty),
             mask=present & known[None, :] & last)  # fmt: skip


@triton.jit
def widen(
    w, scales, zeros, y, out, width, scale_row, scale_height, group,
    BN: tl.constexpr, BK: tl.constexpr, HALVES: tl.constexpr, HAS_ZERO: tl.constexpr,
):  # fmt: skip
    """Write a tile of the weight that codes stand for (N, K); it lies within one group."""
    n, at = tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BK)
    known = n < out
    start = tl.program_id(0) * (2 * BK if HALVES else BK)
    scale = _scaling(scales, n, known, start, scale_row, scale_height, group)[:, None]
    line = y + n[:, None].to(tl.int64) * width
    if HALVES:
        k = start // 2 + at
        low, high = _halves(w, zeros, n, k, width, known, start, scale_row, scale_height, group,
                            HAS_ZERO, False)  # fmt: skip
        inside = known[:, None] & (k < width // 2)[None, :]
        tl.store(line + 2 * k[None, :], (low * scale).to(y.dtype.element_ty), mask=inside)
        tl.store(line + 2 * k[None, :] + 1, (high * scale).to(y.dtype.element_ty), mask=inside)
    else:
        k = start + at
        w_nk = _numbers(w, zeros, n, k, width, known, start, scale_row, scale_height, group,
                        HAS_ZERO, False)  # fmt: skip
        inside = known[:, None] & (k < width)[None, :]
        tl.store(line + k[None, :], (w_nk * scale).to(y.dtype.element_ty), mask=inside)
