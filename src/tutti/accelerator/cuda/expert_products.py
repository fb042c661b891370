"""Experts that have few rows each: their order, their products; and biases of experts.

For inference every weight is read once: a program takes some outputs of one expert; which rows are
the expert's is read on the device, and an expert without rows costs the start of its programs.
So few rows are put in order by one kernel, in which each row counts those before it.
Biases are added to rows that stand in the order of their experts in one pass; their gradients are
sums over runs of rows, each in one order, without a copy of a bias per row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tutti.accelerator.cuda.common import (
    DTYPES,
    WIDEST_ROW,
    power_of_two,
    reason_against,
    warps_for,
)
from tutti.accelerator.cuda.early_launch import early, wait
from tutti.accelerator.gradients import WeightGradients
from tutti.accelerator.reference.experts import Permutation
from tutti.accelerator.registry import Implementation

ROWS = 16  # of a tile: the least that tensor cores take
MOST_ROWS = 1024  # that are put in order by counting
FEW_ROWS = 8  # of an expert on average: more gain by larger tiles
OUTPUTS, INPUTS, WARPS, STAGES = 64, 128, 4, 4
BIAS_COLUMNS = 256
SPLITS = 16  # of a bias' rows: an expert may have most of them


@triton.jit
def _multiply(
    x, weight, counts, bias, y, x_row, out, width, num_experts,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EXPERTS: tl.constexpr,
    EVEN: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write some outputs of an expert's rows."""
    wait(EARLY)
    expert, other = tl.program_id(1), tl.arange(0, EXPERTS)
    count = tl.load(counts + other, mask=other < num_experts, other=0).to(tl.int32)
    begin = tl.sum(tl.where(other < expert, count, 0))
    end = begin + tl.sum(tl.where(other == expert, count, 0))
    n, at = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    known = n < out
    line_n = weight + expert.to(tl.int64) * out * width + n.to(tl.int64) * width
    for first in range(begin, end, BM):
        row = (first + tl.arange(0, BM)).to(tl.int64)
        present = row < end
        sum_mn = tl.zeros((BM, BN), tl.float32)
        for start in range(0, width, BK):
            k = start + at
            x_mk = tl.load(
                x + row[:, None] * x_row + k[None, :],
                mask=present[:, None] & (k < width)[None, :], other=0.0,
            )  # fmt: skip
            if EVEN:
                w_nk = tl.load(line_n[:, None] + k[None, :])
            else:
                inside = known[:, None] & (k < width)[None, :]
                w_nk = tl.load(line_n[:, None] + k[None, :], mask=inside, other=0.0)
            sum_mn = tl.dot(x_mk, tl.trans(w_nk), sum_mn, input_precision=PRECISION)
        if HAS_BIAS:
            sum_mn += tl.load(bias + expert * out + n, mask=known, other=0.0).to(tl.float32)
        tl.store(y + row[:, None] * out + n[None, :], sum_mn.to(y.dtype.element_ty),
                 mask=present[:, None] & known[None, :])  # fmt: skip


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    counts: Tensor,
    bias: Tensor | None = None,
    *,
    later: WeightGradients | None = None,
) -> Tensor:
    """Return each run of rows times its expert's weight, as the reference does."""
    del later  # there are no gradients
    experts, out, width = weight.shape
    y = x.new_empty(x.shape[0], out)
    wide = x.dtype == torch.float32
    inputs = INPUTS // 2 if wide else INPUTS
    _multiply[(-(-out // OUTPUTS), experts)](
        x, weight, counts, bias, y, x.stride(0), out, width, experts, BM=ROWS, BN=OUTPUTS,
        BK=inputs, EXPERTS=power_of_two(experts), HAS_BIAS=bias is not None,
        EVEN=out % OUTPUTS == 0 and width % inputs == 0,
        PRECISION="ieee" if wide else "tf32", num_warps=WARPS,
        num_stages=1 if wide else STAGES, **early(x),
    )  # fmt: skip
    return y


def _supports(
    x: Tensor,
    weight: Tensor,
    counts: Tensor,
    bias: Tensor | None = None,
    *,
    later: WeightGradients | None = None,
    **_options: Any,
) -> str | None:
    del counts
    if x.dtype not in DTYPES or weight.dtype != x.dtype:
        return "floating-point rows and weights of one dtype only"
    if x.shape[0] > FEW_ROWS * weight.shape[0]:
        return f"more than {FEW_ROWS} rows an expert"
    if not x.numel() or not weight.numel():
        return "no rows"
    if x.stride(1) != 1 or not weight.is_contiguous():
        return "contiguous tensors only"
    trained = any(tensor is not None and tensor.requires_grad for tensor in (x, weight, bias))
    if torch.is_grad_enabled() and (trained or later is not None):
        return "no gradients"
    return None


# --- there and back --------------------------------------------------------------------------


@triton.jit
def _order(
    x, experts, rows, order, counts, num_rows, width, x_row, choices,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write a token's copy for one of its experts to its place, or count an expert's rows."""
    wait(EARLY)
    program, at = tl.program_id(0), tl.arange(0, ROWS)
    other = tl.load(experts + at, mask=at < num_rows, other=-1)
    if program >= num_rows:
        expert = program - num_rows
        tl.store(counts + expert, tl.sum((other == expert).to(tl.int64)))
    else:
        own = tl.load(experts + program)
        before = (other < own) | ((other == own) & (at < program))
        place = tl.sum((before & (at < num_rows)).to(tl.int64))
        tl.store(order + place, program.to(tl.int64))
        column = tl.arange(0, WIDTH)
        token = (program // choices).to(tl.int64)
        value = tl.load(x + token * x_row + column, mask=column < width)
        tl.store(rows + place * width + column, value, mask=column < width)


def permute(x: Tensor, experts: Tensor, num_experts: int) -> Permutation:
    """Return a copy of each token for each of its experts, sorted by expert; order is stable."""
    num_rows, width = experts.numel(), x.shape[1]
    rows = x.new_empty(num_rows, width)
    order, counts = (experts.new_empty(size) for size in (num_rows, num_experts))
    _order[(num_rows + num_experts,)](
        x, experts, rows, order, counts, num_rows, width, x.stride(0), experts.shape[1],
        WIDTH=power_of_two(width), ROWS=power_of_two(num_rows),
        num_warps=min(8, warps_for(width)), **early(x),
    )  # fmt: skip
    return Permutation(rows, order, counts)


@triton.jit
def _back(
    rows, order, weights, out, num_rows, width, row_step,
    CHOICES: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Add up the rows of a token, each times its weight."""
    wait(EARLY)
    token, at = tl.program_id(0), tl.arange(0, ROWS)
    origin = tl.load(order + at, mask=at < num_rows, other=-1)
    column = tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.float32)
    for choice in tl.static_range(CHOICES):
        place = tl.sum(tl.where(origin == token * CHOICES + choice, at, 0)).to(tl.int64)
        row = tl.load(rows + place * row_step + column, mask=column < width, other=0.0)
        weight = tl.load(weights + token * CHOICES + choice).to(tl.float32)
        total += row.to(tl.float32) * weight
    tl.store(out + token.to(tl.int64) * width + column, total, mask=column < width)


def unpermute(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Return each token's weighted sum of its experts' rows; weights (T, K)."""
    (num_tokens, choices), (num_rows, width) = weights.shape, rows.shape
    out = rows.new_empty(num_tokens, width)
    _back[(num_tokens,)](
        rows, order, weights, out, num_rows, width, rows.stride(0), CHOICES=choices,
        WIDTH=power_of_two(width), ROWS=power_of_two(num_rows),
        num_warps=min(8, warps_for(width)), **early(weights),
    )  # fmt: skip
    return out


def _supports_permute(x: Tensor, experts: Tensor, num_experts: int) -> str | None:
    del num_experts
    if torch.is_grad_enabled() and x.requires_grad:
        return "no gradients"
    if x.shape[-1] > WIDEST_ROW or not experts.is_contiguous():
        return f"rows up to {WIDEST_ROW} wide and contiguous choices only"
    if not 0 < experts.numel() <= MOST_ROWS:
        return f"1 to {MOST_ROWS} rows only"
    return reason_against(x)


def _supports_unpermute(rows: Tensor, order: Tensor, weights: Tensor) -> str | None:
    if torch.is_grad_enabled() and (rows.requires_grad or weights.requires_grad):
        return "no gradients"
    if rows.shape[-1] > WIDEST_ROW or not weights.is_contiguous():
        return f"rows up to {WIDEST_ROW} wide and contiguous weights only"
    if not 0 < order.numel() <= MOST_ROWS:
        return f"1 to {MOST_ROWS} rows only"
    return reason_against(rows, weights)


# --- biases ----------------------------------------------------------------------------------


@triton.jit
def _add(y, bias, ends, out, num_rows, width, num_experts,
         EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    expert = tl.arange(0, EXPERTS)
    end = tl.load(ends + expert, mask=expert < num_experts, other=2147483647)
    own = tl.sum((row[:, None] >= end[None, :]).to(tl.int64), 1)
    inside = (row < num_rows)[:, None] & (column < width)[None, :] & (own < num_experts)[:, None]
    at = row[:, None] * width + column[None, :]
    near = tl.load(bias + own[:, None] * width + column[None, :], mask=inside, other=0.0)
    value = tl.load(y + at, mask=inside, other=0.0).to(tl.float32) + near.to(tl.float32)
    tl.store(out + at, value, mask=inside)


@triton.jit
def _sums(grad, ends, out, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    expert, split, splits = tl.program_id(0), tl.program_id(2), tl.num_programs(2)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    stop = tl.load(ends + expert)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    total = tl.zeros((COLUMNS,), tl.float32)
    for first in range(start + split * ROWS, stop, splits * ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row < stop)[:, None] & (column < width)[None, :]
        part = tl.load(grad + row[:, None] * width + column[None, :], mask=inside, other=0.0)
        total += tl.sum(part.to(tl.float32), 0)
    place = (split * tl.num_programs(0) + expert) * width
    tl.store(out + place + column, total, mask=column < width)


class _WithBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(ends)
        ctx.bias = bias.shape, bias.dtype
        rows, width = y.shape
        out = torch.empty_like(y)
        _add[(triton.cdiv(rows, ROWS), triton.cdiv(width, BIAS_COLUMNS))](
            y, bias, ends, out, rows, width, bias.shape[0],
            EXPERTS=power_of_two(bias.shape[0]), ROWS=ROWS, COLUMNS=BIAS_COLUMNS,
        )  # fmt: skip
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (ends,), grad = ctx.saved_tensors, gradients[0].contiguous()
        if not ctx.needs_input_grad[1]:
            return grad, None, None
        shape, dtype = ctx.bias
        splits = max(1, min(SPLITS, SPLITS * 32 // shape[0]))
        parts = torch.empty((splits, *shape), dtype=torch.float32, device=grad.device)
        _sums[(shape[0], triton.cdiv(shape[1], BIAS_COLUMNS), splits)](
            grad, ends, parts, shape[1], ROWS=4 * ROWS, COLUMNS=BIAS_COLUMNS
        )
        return grad, parts.sum(0).to(dtype), None


def with_bias(y: Tensor, bias: Tensor, ends: Tensor) -> Tensor:
    """Add to each row its expert's bias; expert e has the rows before ends[e]."""
    biased: Tensor = _WithBias.apply(y.contiguous(), bias.contiguous(), ends)
    return biased


IMPLEMENTATIONS = (
    Implementation(
        operator="grouped_linear", name="few_rows", function=grouped_linear, devices=("cuda",),
        supports=_supports, rank=30, exact=False, needs="triton",
    ),
    Implementation(
        operator="permute", name="few_rows", function=permute, devices=("cuda",),
        supports=_supports_permute, rank=30, exact=False, needs="triton",
    ),
    Implementation(
        operator="unpermute", name="few_rows", function=unpermute, devices=("cuda",),
        supports=_supports_unpermute, rank=30, exact=False, needs="triton",
    ),
)  # fmt: skip
