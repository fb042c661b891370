"""Products whose results for a row have the same bits whatever the other rows are.

Every row is added up in one order: inputs in steps of one size within runs (splits) of one length,
the runs' sums one after the other. How inputs are cut hangs on the weight's shape alone. Of few
rows each run is a program's, and the last to come adds up; of many rows a program has all runs.
Matrix units take rows independently of each other, so that the number of rows in a tile changes no
bit, and neither does their place in it; instructions are of one kind (64 rows) in every tile.

Letters: M rows, N outputs, K inputs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tutti.accelerator.cuda.common import (
    DTYPES,
    power_of_two,
    reason_against,
    zero_counters,
)
from tutti.accelerator.cuda.early_launch import early, wait
from tutti.accelerator.cuda.few_rows import _Codes, _supports_quantised, widened
from tutti.accelerator.cuda.pointwise import gated_activation
from tutti.accelerator.gradients import WeightGradients
from tutti.accelerator.quantised import QuantisedWeight
from tutti.accelerator.reference.pointwise import activation as reference_activation
from tutti.accelerator.registry import Implementation

FEW_ROWS = 256  # up to here runs are programs of their own
UNITS = 132  # of a chip
MOST_SPLITS = 4  # runs of inputs
LEAST_SPLIT = 512  # inputs of one
INPUTS = {torch.float32: 32}  # of a step; else:
WIDE_INPUTS = 64
SWIZZLED = 8  # tiles of rows that stand beside each other read a weight's tile together


class _Tile(NamedTuple):
    """Rows and outputs of a tile, warps, pipeline stages."""

    rows: int
    outputs: int
    warps: int
    stages: int


_FEW, _SOME = _Tile(64, 64, 4, 5), _Tile(128, 64, 4, 4)
_MANY = _Tile(128, 128, 8, 4)
_WIDE = _Tile(128, 256, 8, 3)  # without splits: there are registers for it
_FLOAT32 = _Tile(32, 64, 4, 1)


@triton.jit
def _run_of(
    x, w, m, n, begin, end, x_row, rows, out, width,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the sums of a run of inputs."""
    at = tl.arange(0, BK)
    sum_mn = tl.zeros((BM, BN), tl.float32)
    present, known = (m < rows)[:, None], (n < out)[None, :]
    line_m, line_n = x + m.to(tl.int64)[:, None] * x_row, w + n.to(tl.int64)[None, :] * width
    for start in range(begin, end, BK):
        k = start + at
        inside = k < width
        x_mk = tl.load(line_m + k[None, :], mask=present if EVEN else present & inside[None, :],
                       other=0.0)  # fmt: skip
        w_kn = tl.load(line_n + k[:, None], mask=known if EVEN else known & inside[:, None],
                       other=0.0)  # fmt: skip
        sum_mn = tl.dot(x_mk, w_kn, sum_mn, input_precision=PRECISION)
    return sum_mn


@triton.jit(do_not_specialize=["rows"])
def _multiply(
    x, w, bias, y, parts, counters, x_row, rows, out, width, each,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr,
    APART: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write a tile of outputs; APART: runs of inputs are programs of their own."""
    tiles_m, tiles_n = tl.cdiv(rows, BM), tl.cdiv(out, BN)
    tile, block = tl.program_id(0), GROUP * tiles_n
    first = tile // block * GROUP
    high = tl.minimum(tiles_m - first, GROUP)
    m = (first + tile % block % high) * BM + tl.arange(0, BM)
    n = tile % block // high * BN + tl.arange(0, BN)
    wait(EARLY)
    inside = (m < rows)[:, None] & (n < out)[None, :]
    place = m.to(tl.int64)[:, None] * out + n[None, :]
    last = True
    if SPLITS == 1:
        sum_mn = _run_of(x, w, m, n, 0, width, x_row, rows, out, width, BM, BN, BK, EVEN,
                         PRECISION)  # fmt: skip
    elif APART:
        split, size = tl.program_id(1), rows.to(tl.int64) * out
        begin = split * each
        sum_mn = _run_of(x, w, m, n, begin, tl.minimum(begin + each, width), x_row, rows, out,
                         width, BM, BN, BK, EVEN, PRECISION)  # fmt: skip
        tl.store(parts + split * size + place, sum_mn, mask=inside)
        tl.debug_barrier()
        last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLITS - 1
        if last:
            tl.store(counters + tile, 0)  # as the next call wants to find it
            sum_mn = tl.load(parts + place, mask=inside, other=0.0)
            for other in range(1, SPLITS):
                sum_mn += tl.load(parts + other * size + place, mask=inside, other=0.0)
    else:
        sum_mn = _run_of(x, w, m, n, 0, each, x_row, rows, out, width, BM, BN, BK, EVEN,
                         PRECISION)  # fmt: skip
        for split in range(1, SPLITS):
            begin = split * each
            sum_mn += _run_of(x, w, m, n, begin, tl.minimum(begin + each, width), x_row, rows, out,
                              width, BM, BN, BK, EVEN, PRECISION)  # fmt: skip
    if HAS_BIAS:
        sum_mn += tl.load(bias + n, mask=n < out, other=0.0).to(tl.float32)[None, :]
    tl.store(y + place, sum_mn.to(y.dtype.element_ty), mask=inside & last)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, later: WeightGradients | None = None
) -> Tensor:
    """Return x·Wᵀ + b."""
    del later
    lines = x.reshape(-1, x.shape[-1])
    (rows, width), out = lines.shape, weight.shape[0]
    y = lines.new_empty(rows, out)
    step = INPUTS.get(x.dtype, WIDE_INPUTS)
    splits, each = _splits(out, width, step)
    few = rows <= FEW_ROWS
    tile = _tile(rows, splits, x.dtype)
    tiles = -(-rows // tile.rows) * -(-out // tile.outputs)
    apart = few and splits > 1
    parts = counters = y
    if apart:
        parts = y.new_empty((splits, rows, out), dtype=torch.float32)
        counters = zero_counters(y.device, power_of_two(tiles))
    _multiply[(tiles, splits if apart else 1)](
        lines, weight, bias, y, parts, counters, lines.stride(0), rows, out, width, each,
        BM=tile.rows, BN=tile.outputs, BK=step, SPLITS=splits, APART=apart,
        GROUP=SWIZZLED, EVEN=width % step == 0 and each * splits <= width,
        HAS_BIAS=bias is not None, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tile.warps, num_stages=tile.stages, **early(lines),
    )  # fmt: skip
    return y.view(*x.shape[:-1], out)


def _tile(rows: int, splits: int, dtype: torch.dtype) -> _Tile:
    """Return how a product is cut: no row's bits hang on it."""
    if dtype == torch.float32:
        return _FLOAT32
    if rows <= FEW_ROWS:
        return _FEW if rows <= _FEW.rows else _SOME
    return _MANY if splits > 1 else _WIDE


def _splits(out: int, width: int, step: int) -> tuple[int, int]:
    """Return into how many runs inputs are cut, and how long each is: by the weight's shape."""
    programs = -(-out // _FEW.outputs)
    wanted = max(1, min(MOST_SPLITS, 2 * UNITS // programs, width // LEAST_SPLIT))
    each = triton.cdiv(triton.cdiv(width, wanted), step) * step
    return -(-width // each), each


def quantised_linear(x: Tensor, weight: QuantisedWeight, bias: Tensor | None = None) -> Tensor:
    """Return x·Wᵀ + b of what codes stand for, rounded to the rows' dtype."""
    codes = _Codes.of(weight)
    rows = weight.inputs(x.reshape(-1, codes.width))
    return linear(rows, widened(codes, x.dtype), bias).view(*x.shape[:-1], codes.out)


def _supports(x: Tensor, weight: Tensor, *_others: Any, **_options: Any) -> str | None:
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return "no gradients"
    if x.dtype not in DTYPES or weight.dtype != x.dtype or not weight.is_contiguous():
        return "a contiguous weight of the rows' dtype only"
    if not x.numel() or x.stride(-1) != 1:
        return "rows without gaps only"
    return "being compiled" if torch.compiler.is_compiling() else None


def _no_gradient(x: Tensor, **_options: Any) -> str | None:
    return "no gradients" if torch.is_grad_enabled() and x.requires_grad else reason_against(x)


def _takes(x: Any, weight: QuantisedWeight, bias: Tensor | None = None) -> str | None:
    if not isinstance(x, Tensor) or weight.narrow_inputs:
        return "wide rows only"
    return _supports_quantised(x, weight, bias)


IMPLEMENTATIONS = (
    Implementation(
        operator="linear", name="fixed", function=linear, devices=("cuda",), supports=_supports,
        rank=-10, exact=False, needs="triton", invariant=True,
    ),
    Implementation(
        operator="quantised_linear", name="fixed", function=quantised_linear, devices=("cuda",),
        supports=_takes, rank=-10, exact=False, needs="triton", invariant=True,
    ),
    *(  # element by element in any case
        Implementation(
            operator=name, name="fixed", function=function, devices=("cuda",), rank=-10,
            supports=_no_gradient, exact=False, needs="triton", invariant=True,
        )
        for name, function in (
            ("activation", reference_activation), ("gated_activation", gated_activation)
        )
    ),
)  # fmt: skip
