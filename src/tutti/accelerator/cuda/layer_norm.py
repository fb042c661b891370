"""LayerNorm with and without residual, in one pass over memory each way; laid out as RMSNorm's."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tutti.accelerator.cuda.common import num_programs, power_of_two, rows_of, warps_for
from tutti.accelerator.cuda.norm import supports_norm
from tutti.accelerator.registry import Implementation

BACKWARD_PROGRAMS, BACKWARD_WARPS = 4, 8  # per processor; per program at most


@triton.jit
def _layer_forward(
    x, residual, weight, bias, y, total, statistics, x_row, residual_row, width, eps,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(x + row * x_row + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        values += tl.load(residual + row * residual_row + columns, mask=inside, other=0.0).to(
            tl.float32
        )
        # the sum is what the next layer sees: rounded as it is stored
        values = values.to(total.dtype.element_ty).to(tl.float32)
        tl.store(total + row * width + columns, values, mask=inside)
    mean = tl.sum(values, axis=0) / width
    centred = tl.where(inside, values - mean, 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=0) / width + eps)
    tl.store(statistics + 2 * row, mean)
    tl.store(statistics + 2 * row + 1, inverse)
    normed = centred * inverse
    if HAS_WEIGHT:
        normed *= tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        normed += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * width + columns, normed, mask=inside)


@triton.jit
def _layer_backward(
    grad_y, grad_total, x, weight, statistics, grad_x, of_weight, of_bias, grad_y_row,
    grad_total_row, x_row, rows, width,
    HAS_TOTAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program, step = tl.program_id(0), tl.num_programs(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    factor = tl.full((BLOCK,), 1.0, tl.float32)
    if HAS_WEIGHT:
        factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    weights, biases = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    row = program.to(tl.int64)
    for _ in range(program, rows, step):
        values = tl.load(x + row * x_row + columns, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.load(grad_y + row * grad_y_row + columns, mask=inside, other=0.0).to(
            tl.float32
        )
        mean, inverse = tl.load(statistics + 2 * row), tl.load(statistics + 2 * row + 1)
        normed = (values - mean) * inverse
        if HAS_WEIGHT:
            weights += gradient * normed
        if HAS_BIAS:
            biases += gradient
        scaled = gradient * factor  # nothing outside
        along = tl.sum(scaled * normed, axis=0) / width
        own = (scaled - tl.sum(scaled, axis=0) / width - normed * along) * inverse
        if HAS_TOTAL:
            own += tl.load(grad_total + row * grad_total_row + columns, mask=inside, other=0.0).to(
                tl.float32
            )
        tl.store(grad_x + row * width + columns, own, mask=inside)
        row += step
    if HAS_WEIGHT:
        tl.store(of_weight + program * width + columns, weights, mask=inside)
    if HAS_BIAS:
        tl.store(of_bias + program * width + columns, biases, mask=inside)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        with_total: bool,
    ) -> tuple[Tensor, Tensor] | Tensor:
        rows = rows_of(x)
        count, width = rows.shape
        others = None if residual is None else rows_of(residual)
        y = torch.empty((count, width), dtype=x.dtype, device=x.device)
        total = rows if others is None else torch.empty_like(y)
        statistics = torch.empty((count, 2), dtype=torch.float32, device=x.device)
        _layer_forward[(count,)](
            rows, rows if others is None else others, rows if weight is None else weight,
            rows if bias is None else bias, y, total, statistics, rows.stride(0),
            0 if others is None else others.stride(0), width, eps,
            HAS_RESIDUAL=others is not None, HAS_WEIGHT=weight is not None,
            HAS_BIAS=bias is not None, BLOCK=power_of_two(width), num_warps=warps_for(width),
        )  # fmt: skip
        ctx.save_for_backward(total, weight, statistics)
        ctx.bias = None if bias is None else bias.dtype
        ctx.has_residual, ctx.shape = residual is not None, x.shape
        if not with_total:
            return y.view(x.shape)
        return y.view(x.shape), total.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        total, weight, statistics = ctx.saved_tensors
        count, width = total.shape
        grad_y = rows_of(gradients[0])
        grad_total = rows_of(gradients[1]) if len(gradients) > 1 else None
        grad_x = torch.empty((count, width), dtype=total.dtype, device=total.device)
        programs = min(count, num_programs(total, BACKWARD_PROGRAMS))
        parts = torch.empty((2, programs, width), dtype=torch.float32, device=total.device)
        _layer_backward[(programs,)](
            grad_y, grad_y if grad_total is None else grad_total, total,
            total if weight is None else weight, statistics, grad_x, parts[0], parts[1],
            grad_y.stride(0), 0 if grad_total is None else grad_total.stride(0), total.stride(0),
            count, width, HAS_TOTAL=grad_total is not None, HAS_WEIGHT=weight is not None,
            HAS_BIAS=ctx.bias is not None, BLOCK=power_of_two(width),
            num_warps=min(BACKWARD_WARPS, warps_for(width)),
        )  # fmt: skip
        grad_weight = None if weight is None else parts[0].sum(0).to(weight.dtype)
        grad_bias = None if ctx.bias is None else parts[1].sum(0).to(ctx.bias)
        grad_x = grad_x.view(ctx.shape)
        return grad_x, (grad_x if ctx.has_residual else None), grad_weight, grad_bias, None, None


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float) -> Tensor:
    """Return (x − mean) ÷ deviation · weight + bias."""
    y: Tensor = _LayerNorm.apply(x, None, weight, bias, eps, False)
    return y


def add_layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, *, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the norm of x + residual, and the sum; x where there is no residual."""
    both: tuple[Tensor, Tensor] = _LayerNorm.apply(x, residual, weight, bias, eps, True)
    return both


IMPLEMENTATIONS = (
    Implementation(
        operator="layer_norm", name="triton", function=layer_norm, devices=("cuda",),
        supports=supports_norm, rank=20, needs="triton",
    ),
    Implementation(
        operator="add_layer_norm", name="triton", function=add_layer_norm, devices=("cuda",),
        supports=supports_norm, rank=20, needs="triton",
    ),
)  # fmt: skip
