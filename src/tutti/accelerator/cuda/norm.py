"""RMSNorm with and without residual, in one pass over memory each way.

Forward: one program per row. Backward: programs walk over many rows and keep their share of the
weight's gradient in registers, so that it is written once per program; a sum over programs ends it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tutti.accelerator.cuda.common import (
    WIDEST_ROW,
    num_programs,
    power_of_two,
    reason_against,
    rows_of,
    warps_for,
)
from tutti.accelerator.cuda.early_launch import early, wait
from tutti.accelerator.registry import Implementation

BACKWARD_PROGRAMS, BACKWARD_WARPS = 8, 8  # per processor; per program at most


@triton.jit
def normed_row(
    x, residual, weight, total, row, x_row, residual_row, width, eps,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, OFFSET: tl.constexpr,
    dtype: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return a row's norm, and one over its root mean square; write the sum with the residual."""
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
    inverse = 1.0 / tl.sqrt(tl.sum(values * values, axis=0) / width + eps)
    normed = values * inverse
    if HAS_WEIGHT:
        factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
        if OFFSET:  # noqa: SIM108
            normed = normed * (1.0 + factor)
        else:
            normed = normed.to(dtype).to(tl.float32) * factor
    return normed, inverse


@triton.jit
def _forward(
    x, residual, weight, y, total, scale, x_row, residual_row, width, eps,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, OFFSET: tl.constexpr,
    EARLY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    normed, inverse = normed_row(x, residual, weight, total, row, x_row, residual_row, width, eps,
                                 HAS_RESIDUAL, HAS_WEIGHT, OFFSET, y.dtype.element_ty,
                                 BLOCK)  # fmt: skip
    columns = tl.arange(0, BLOCK)
    tl.store(scale + row, inverse)
    tl.store(y + row * width + columns, normed, mask=columns < width)


@triton.jit
def _backward(
    grad_y, grad_total, x, weight, scale, grad_x, partial, grad_y_row, grad_total_row, x_row,
    rows, width,
    HAS_TOTAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, OFFSET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program, step = tl.program_id(0), tl.num_programs(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    factor = tl.full((BLOCK,), 1.0, tl.float32)
    if HAS_WEIGHT:
        factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
        if OFFSET:
            factor += 1.0
    collected = tl.zeros((BLOCK,), tl.float32)
    row = program.to(tl.int64)
    for _ in range(program, rows, step):
        values = tl.load(x + row * x_row + columns, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.load(grad_y + row * grad_y_row + columns, mask=inside, other=0.0).to(
            tl.float32
        )
        inverse = tl.load(scale + row)
        normed = values * inverse
        if HAS_WEIGHT:
            collected += gradient * normed
        scaled = gradient * factor
        own = (scaled - normed * (tl.sum(scaled * normed, axis=0) / width)) * inverse
        if HAS_TOTAL:
            own += tl.load(grad_total + row * grad_total_row + columns, mask=inside, other=0.0).to(
                tl.float32
            )
        tl.store(grad_x + row * width + columns, own, mask=inside)
        row += step
    if HAS_WEIGHT:
        tl.store(partial + program * width + columns, collected, mask=inside)


def _run_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, unit_offset: bool
) -> tuple[Tensor, Tensor, Tensor]:
    rows = rows_of(x)
    count, width = rows.shape
    others = None if residual is None else rows_of(residual)
    y = torch.empty((count, width), dtype=x.dtype, device=x.device)
    total = rows if others is None else torch.empty_like(y)
    scale = torch.empty(count, dtype=torch.float32, device=x.device)
    _forward[(count,)](
        rows, rows if others is None else others, rows if weight is None else weight, y, total,
        scale, rows.stride(0), 0 if others is None else others.stride(0), width, eps,
        HAS_RESIDUAL=others is not None, HAS_WEIGHT=weight is not None, OFFSET=unit_offset,
        BLOCK=power_of_two(width), num_warps=warps_for(width), **early(rows),
    )  # fmt: skip
    return y, total, scale


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        eps: float,
        unit_offset: bool,
        with_total: bool,
    ) -> tuple[Tensor, Tensor] | Tensor:
        y, total, scale = _run_forward(x, residual, weight, eps, unit_offset)
        ctx.save_for_backward(total, weight, scale)
        ctx.has_residual, ctx.unit_offset, ctx.shape = residual is not None, unit_offset, x.shape
        if not with_total:
            return y.view(x.shape)
        return y.view(x.shape), total.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        total, weight, scale = ctx.saved_tensors
        count, width = total.shape
        grad_y = rows_of(gradients[0])
        grad_total = rows_of(gradients[1]) if len(gradients) > 1 else None
        grad_x = torch.empty((count, width), dtype=total.dtype, device=total.device)
        programs = min(count, num_programs(total, BACKWARD_PROGRAMS))
        partial = torch.empty(
            (programs if weight is not None else 1, width), dtype=torch.float32, device=total.device
        )
        _backward[(programs,)](
            grad_y, grad_y if grad_total is None else grad_total, total,
            total if weight is None else weight, scale, grad_x, partial, grad_y.stride(0),
            0 if grad_total is None else grad_total.stride(0), total.stride(0), count, width,
            HAS_TOTAL=grad_total is not None, HAS_WEIGHT=weight is not None,
            OFFSET=ctx.unit_offset, BLOCK=power_of_two(width),
            num_warps=min(BACKWARD_WARPS, warps_for(width)),
        )  # fmt: skip
        grad_weight = None if weight is None else partial.sum(0).to(weight.dtype)
        grad_x = grad_x.view(ctx.shape)
        return grad_x, (grad_x if ctx.has_residual else None), grad_weight, None, None, None


def rms_norm(x: Tensor, weight: Tensor | None, *, eps: float, unit_offset: bool = False) -> Tensor:
    """Return x ÷ rms(x) · weight."""
    y: Tensor = _RmsNorm.apply(x, None, weight, eps, unit_offset, False)
    return y


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    *,
    eps: float,
    unit_offset: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the norm of x + residual, and the sum; x where there is no residual."""
    both: tuple[Tensor, Tensor] = _RmsNorm.apply(x, residual, weight, eps, unit_offset, True)
    return both


def supports_norm(x: Tensor, *others: Tensor | None, **_options: Any) -> str | None:
    """Say why a norm of x, with what it is added to and multiplied by, cannot run here."""
    if x.shape[-1] > WIDEST_ROW:
        return f"rows wider than {WIDEST_ROW}"
    return reason_against(x, *others)


IMPLEMENTATIONS = (
    Implementation(
        operator="rms_norm", name="triton", function=rms_norm, devices=("cuda",),
        supports=supports_norm, rank=20, needs="triton",
    ),
    Implementation(
        operator="add_rms_norm", name="triton", function=add_rms_norm, devices=("cuda",),
        supports=supports_norm, rank=20, needs="triton",
    ),
)  # fmt: skip
