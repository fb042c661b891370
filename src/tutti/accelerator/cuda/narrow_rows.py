"""Norms and gates whose rows are written in 8 bits, for a product in 8 bits, in one pass."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tutti.accelerator.cuda.common import (
    WIDEST_ROW,
    power_of_two,
    reason_against,
    rows_of,
    warps_for,
)
from tutti.accelerator.cuda.early_launch import early, wait
from tutti.accelerator.cuda.narrow_columns import scale_and_inverse
from tutti.accelerator.cuda.norm import normed_row
from tutti.accelerator.cuda.pointwise import CODES, gated_row, slope_of
from tutti.accelerator.reference.narrow import NARROW
from tutti.accelerator.registry import Implementation
from tutti.models import Activation


@triton.jit
def _write(values, out, scales, row, width, dtype: tl.constexpr, BLOCK: tl.constexpr):
    """Write a row in 8 bits, rounded to the dtype of wide rows before, and its scale."""
    columns = tl.arange(0, BLOCK)
    values = values.to(dtype).to(tl.float32)
    scale, inverse = scale_and_inverse(tl.max(tl.abs(values), 0))
    narrow = (values * inverse).to(out.dtype.element_ty)
    tl.store(out + row * width + columns, narrow, mask=columns < width)
    tl.store(scales + row, scale)


@triton.jit
def _norm(
    x, residual, weight, out, scales, total, x_row, residual_row, width, eps,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, OFFSET: tl.constexpr,
    EARLY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    normed, _ = normed_row(x, residual, weight, total, row, x_row, residual_row, width, eps,
                           HAS_RESIDUAL, HAS_WEIGHT, OFFSET, x.dtype.element_ty, BLOCK)  # fmt: skip
    _write(normed, out, scales, row, width, x.dtype.element_ty, BLOCK)


@triton.jit
def _gate(
    x, out, scales, x_row, width, alpha, limit,
    KIND: tl.constexpr, EARLY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    value = gated_row(x + row * x_row, columns, width, alpha, limit, x.dtype.element_ty, KIND)
    _write(value, out, scales, row, width, x.dtype.element_ty, BLOCK)


def narrow_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    *,
    eps: float,
    unit_offset: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the norm of x + residual in 8 bits, its rows' scales, and the sum."""
    rows = rows_of(x)
    count, width = rows.shape
    others = None if residual is None else rows_of(residual)
    out = torch.empty((count, width), dtype=NARROW, device=x.device)
    scales = torch.empty(count, dtype=torch.float32, device=x.device)
    total = rows if others is None else rows.new_empty(count, width)
    _norm[(count,)](
        rows, rows if others is None else others, rows if weight is None else weight, out, scales,
        total, rows.stride(0), 0 if others is None else others.stride(0), width, eps,
        HAS_RESIDUAL=others is not None, HAS_WEIGHT=weight is not None, OFFSET=unit_offset,
        BLOCK=power_of_two(width), num_warps=warps_for(width), **early(rows),
    )  # fmt: skip
    return out, scales, total.view(x.shape)


def narrow_gated_activation(
    x: Tensor, *, kind: Activation, alpha: float = 1.702, limit: float = 7.0
) -> tuple[Tensor, Tensor]:
    """Return act(gate) · up in 8 bits, and its rows' scales."""
    rows = rows_of(x)
    count, width = rows.shape[0], rows.shape[1] // 2
    out = torch.empty((count, width), dtype=NARROW, device=x.device)
    scales = torch.empty(count, dtype=torch.float32, device=x.device)
    _gate[(count,)](
        rows, out, scales, rows.stride(0), width, slope_of(kind, alpha), limit,
        KIND=CODES[kind], BLOCK=power_of_two(width), num_warps=warps_for(width), **early(rows),
    )  # fmt: skip
    return out, scales


def _supports(
    x: Tensor, residual: Tensor | None = None, weight: Tensor | None = None, **_options: Any
) -> str | None:
    if torch.is_grad_enabled() and x.requires_grad:
        return "no gradients"
    if x.shape[-1] > 2 * WIDEST_ROW:
        return f"rows wider than {2 * WIDEST_ROW}"
    return reason_against(x, residual, weight)


IMPLEMENTATIONS = (
    Implementation(
        operator="narrow_rms_norm", name="triton", function=narrow_rms_norm, devices=("cuda",),
        supports=_supports, rank=20, exact=False, needs="triton",
    ),
    Implementation(
        operator="narrow_gated_activation", name="triton", function=narrow_gated_activation,
        devices=("cuda",), supports=_supports, rank=20, exact=False, needs="triton",
    ),
)  # fmt: skip
