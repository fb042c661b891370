"""Biases of experts: added to rows that stand in the order of their experts, in one pass.

Their gradients are sums over runs of rows, each in one order, without a copy of a bias per row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tutti.accelerator.cuda.common import power_of_two

ROWS, COLUMNS = 16, 256


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
    expert = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    stop = tl.load(ends + expert)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    total = tl.zeros((COLUMNS,), tl.float32)
    for first in range(start, stop, ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row < stop)[:, None] & (column < width)[None, :]
        part = tl.load(grad + row[:, None] * width + column[None, :], mask=inside, other=0.0)
        total += tl.sum(part.to(tl.float32), 0)
    tl.store(out + expert * width + column, total, mask=column < width)


class _WithBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(ends)
        ctx.bias = bias.shape, bias.dtype
        rows, width = y.shape
        out = torch.empty_like(y)
        _add[(triton.cdiv(rows, ROWS), triton.cdiv(width, COLUMNS))](
            y, bias, ends, out, rows, width, bias.shape[0],
            EXPERTS=power_of_two(bias.shape[0]), ROWS=ROWS, COLUMNS=COLUMNS,
        )  # fmt: skip
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (ends,), grad = ctx.saved_tensors, gradients[0].contiguous()
        if not ctx.needs_input_grad[1]:
            return grad, None, None
        shape, dtype = ctx.bias
        out = torch.empty(shape, dtype=dtype, device=grad.device)
        _sums[(shape[0], triton.cdiv(shape[1], COLUMNS))](
            grad, ends, out, shape[1], ROWS=4 * ROWS, COLUMNS=COLUMNS
        )
        return grad, out, None


def with_bias(y: Tensor, bias: Tensor, ends: Tensor) -> Tensor:
    """Add to each row its expert's bias; expert e has the rows before ends[e]."""
    found: Tensor = _WithBias.apply(y.contiguous(), bias.contiguous(), ends)
    return found
