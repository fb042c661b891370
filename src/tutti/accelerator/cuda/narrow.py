"""Products of 8 bits on chips whose matrix units have them, with a scale per row.

Rows are rounded in one kernel each; the weight's transpose, which the input's gradient needs, is
rounded anew from the weight: that reads and writes no more than turning the rounded one would.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tutti.accelerator.cuda.common import power_of_two, reason_against
from tutti.accelerator.cuda.expert_bias import with_bias
from tutti.accelerator.gradients import WeightGradients
from tutti.accelerator.reference.narrow import (
    MULTIPLE,
    NARROW,
    Narrow,
    NarrowGrouped,
    NarrowLinear,
    power_of_two_scales,
)
from tutti.accelerator.registry import Implementation

BLOCK = 4096
TILE = 64


@triton.jit
def _narrow_rows(
    x, columns, ends, out, scales, width, x_step, num_experts, HAS_COLUMNS: tl.constexpr,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a row in 8 bits and its scale; its columns are multiplied before, if that is given.

    Of experts each has columns of its own: expert e those of the rows before ends[e].
    """
    row = tl.program_id(0).to(tl.int64)
    if EXPERTS > 0:
        expert = tl.arange(0, EXPERTS)
        end = tl.load(ends + expert, mask=expert < num_experts, other=2147483647)
        columns += tl.sum((end <= row).to(tl.int64), 0) * width
    x += row * x_step
    out += row * width
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        place = start + tl.arange(0, BLOCK)
        value = tl.load(x + place, mask=place < width, other=0.0).to(tl.float32)
        if HAS_COLUMNS:
            value *= tl.load(columns + place, mask=place < width, other=0.0)
        largest = tl.maximum(largest, tl.abs(value))
    top = tl.max(largest, 0)
    bits = top.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 135 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = tl.minimum(tl.maximum(exponent, -126), 126)
    scale = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    inverse = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    finite = top < float("inf")
    tl.store(scales + row, tl.where(finite, scale, float("nan")))
    for start in range(0, width, BLOCK):
        place = start + tl.arange(0, BLOCK)
        value = tl.load(x + place, mask=place < width, other=0.0).to(tl.float32)
        if HAS_COLUMNS:
            value *= tl.load(columns + place, mask=place < width, other=0.0)
        tl.store(out + place, (value * inverse).to(out.dtype.element_ty), mask=place < width)


@triton.jit
def _narrow_transpose(
    weight, scales, rows_by, out, rows, width, step, BY_COLUMNS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Write a tile of the transpose in 8 bits, by scales of rows or columns that are known.

    With those of columns each row is multiplied by its own number before.
    """
    expert = tl.program_id(2).to(tl.int64)
    weight += expert * rows * step
    scales += expert * rows
    out += expert * rows * width
    row = tl.program_id(1) * TILE + tl.arange(0, TILE)
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    at = row.to(tl.int64)[:, None] * step + column[None, :]
    value = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if BY_COLUMNS:
        value *= tl.load(rows_by + row, mask=row < rows, other=0.0)[:, None]
        value *= (1.0 / tl.load(scales + column, mask=column < width, other=1.0))[None, :]
    else:
        value *= (1.0 / tl.load(scales + row, mask=row < rows, other=1.0))[:, None]
    value = tl.trans(value)
    to = column.to(tl.int64)[:, None] * rows + row[None, :]
    tl.store(out + to, value.to(out.dtype.element_ty), mask=tl.trans(inside))


@triton.jit
def _largest_in_columns(x, rows_by, largest, rows, width, step, TILE: tl.constexpr):
    """Let each column's largest number be known, each row times its own; the bits order alike."""
    row = tl.program_id(1) * TILE + tl.arange(0, TILE)
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    at = row.to(tl.int64)[:, None] * step + column[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    value *= tl.load(rows_by + row, mask=row < rows, other=0.0)[:, None]
    # what is no number counts as more than any
    value = tl.where(value == value, tl.abs(value), float("inf"))
    bits = tl.max(value, 0).to(tl.int32, bitcast=True)
    tl.atomic_max(largest + column, bits, mask=column < width)


def narrowed(x: Tensor, columns: Tensor | None = None, ends: Tensor | None = None) -> Narrow:
    """Return rows in 8 bits, and the power of two that each was divided by.

    With `columns` each is multiplied by its own before; with `ends` each expert has its own.
    """
    count, width = x.shape
    out = torch.empty((count, width), dtype=NARROW, device=x.device)
    scales = torch.empty(count, dtype=torch.float32, device=x.device)
    _narrow_rows[(count,)](
        x, scales if columns is None else columns, scales if ends is None else ends, out, scales,
        width, x.stride(0), 0 if ends is None else len(ends), HAS_COLUMNS=columns is not None,
        EXPERTS=0 if ends is None else power_of_two(len(ends)),
        BLOCK=min(BLOCK, power_of_two(width)), num_warps=8,
    )  # fmt: skip
    return Narrow(out, scales)


def narrowed_transpose(weight: Tensor, scales: Tensor) -> Tensor:
    """Return the transpose, or each expert's, in 8 bits, its columns divided by their scales."""
    *experts, rows, width = weight.shape
    out = torch.empty((*experts, width, rows), dtype=NARROW, device=weight.device)
    grid = (triton.cdiv(width, TILE), triton.cdiv(rows, TILE), *(experts or (1,)))
    _narrow_transpose[grid](
        weight, scales, scales, out, rows, width, weight.stride(-2), BY_COLUMNS=False, TILE=TILE,
        num_warps=4,
    )  # fmt: skip
    return out


def narrowed_columns(x: Tensor, rows_by: Tensor) -> Narrow:
    """Return the transpose of rows, each times its number, in 8 bits with a scale per column."""
    rows, width = x.shape
    largest = torch.zeros(width, dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(width, TILE), triton.cdiv(rows, TILE))
    _largest_in_columns[grid](
        x, rows_by, largest.view(torch.int32), rows, width, x.stride(0), TILE=TILE, num_warps=4
    )
    scales = power_of_two_scales(largest)
    out = torch.empty((width, rows), dtype=NARROW, device=x.device)
    _narrow_transpose[(*grid, 1)](
        x, scales, rows_by, out, rows, width, x.stride(0), BY_COLUMNS=True, TILE=TILE, num_warps=4
    )
    return Narrow(out, scales)


@triton.jit
def _turn(x, out, rows, width, TILE: tl.constexpr):
    row = tl.program_id(1) * TILE + tl.arange(0, TILE)
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    value = tl.load(x + row.to(tl.int64)[:, None] * width + column[None, :], mask=inside, other=0)
    to = column.to(tl.int64)[:, None] * rows + row[None, :]
    tl.store(out + to, tl.trans(value), mask=tl.trans(inside))


def turned(x: Tensor) -> Tensor:
    """Return the transpose of numbers of 8 bits, as they are."""
    rows, width = x.shape
    out = torch.empty((width, rows), dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(width, 2 * TILE), triton.cdiv(rows, 2 * TILE))
    _turn[grid](x.view(torch.int8), out.view(torch.int8), rows, width, TILE=2 * TILE, num_warps=8)
    return out


class ScaledProducts:
    """torch's scaled products; the input's gradient is summed more carefully."""

    def forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Narrow, Tensor]:
        """Return x·Wᵀ, the rows of x as they were multiplied, and the scales of W's rows."""
        own, other = narrowed(x), narrowed(weight)
        y = torch._scaled_mm(
            own.values, other.values.t(), own.scales.unsqueeze(1), other.scales.unsqueeze(0),
            out_dtype=x.dtype, use_fast_accum=True,
        )  # fmt: skip
        return y, own, other.scales

    def backward(self, gradient: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
        """Return g·W."""
        if gradient.stride(-1) != 1:
            gradient = gradient.contiguous()
        own, own_scales = narrowed(gradient, scales)
        ones = torch.ones((1, weight.shape[1]), dtype=torch.float32, device=weight.device)
        return torch._scaled_mm(
            own, narrowed_transpose(weight, scales).t(), own_scales.unsqueeze(1), ones,
            out_dtype=gradient.dtype, use_fast_accum=False,
        )  # fmt: skip

    def of_weight(self, gradient: Tensor, x: Narrow, dtype: torch.dtype) -> Tensor:
        """Return gᵀ·x."""
        own = narrowed_columns(gradient.contiguous(), x.scales)
        ones = torch.ones((1, x.values.shape[1]), dtype=torch.float32, device=gradient.device)
        found = torch._scaled_mm(
            own.values, turned(x.values).t(), own.scales.unsqueeze(1), ones,
            out_dtype=gradient.dtype, use_fast_accum=False,
        )  # fmt: skip
        return found.to(dtype)


class ScaledGroupedProducts:
    """torch's scaled grouped products; `runs` are where each expert's rows end."""

    def forward(self, x: Tensor, weight: Tensor, runs: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row times its expert's weight, and the scales of the weights' rows."""
        (own, own_scales), (other, scales) = narrowed(x), narrowed(weight.flatten(0, 1))
        scales = scales.view(weight.shape[:2])
        other = other.view(weight.shape).transpose(1, 2)
        return _grouped(own, other, own_scales, scales, runs, x.dtype), scales

    def backward(self, gradient: Tensor, weight: Tensor, scales: Tensor, runs: Tensor) -> Tensor:
        """Return the gradient of the rows."""
        own, own_scales = narrowed(gradient, scales, runs)
        ones = torch.ones(weight.shape[::2], dtype=torch.float32, device=weight.device)
        other = narrowed_transpose(weight, scales).transpose(1, 2)
        return _grouped(own, other, own_scales, ones, runs, gradient.dtype)

    def of_weight(self, gradient: Tensor, x: Tensor, runs: Tensor) -> Tensor:
        """Return the gradient of the weights."""
        return torch._grouped_mm(gradient.t(), x, offs=runs)


def _grouped(
    x: Tensor, weight: Tensor, x_scales: Tensor, scales: Tensor, ends: Tensor, dtype: torch.dtype
) -> Tensor:
    return torch._scaled_grouped_mm(
        x, weight, x_scales, scales, offs=ends, out_dtype=dtype, use_fast_accum=True
    )


def narrow_grouped_linear(
    x: Tensor,
    weight: Tensor,
    counts: Tensor,
    bias: Tensor | None = None,
    *,
    later: WeightGradients | None = None,
) -> Tensor:
    """Return each run of rows times its expert's weight, of products in 8 bits."""
    ends = counts.cumsum(0, dtype=torch.int32)
    y: Tensor = NarrowGrouped.apply(x, weight, ends, later, ScaledGroupedProducts())
    return y if bias is None else with_bias(y, bias, ends)


def narrow_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, later: WeightGradients | None = None
) -> Tensor:
    """Return x·Wᵀ + b of products in 8 bits."""
    y: Tensor = NarrowLinear.apply(x, weight, bias, later, ScaledProducts())
    return y


@functools.cache
def _has_narrow_products(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


def _supports_grouped(
    x: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None = None, **_options: Any
) -> str | None:
    del counts
    if not x.is_contiguous() or not weight.is_contiguous():
        return "contiguous tensors only"
    return _supports(x, weight, bias)


def _supports(x: Tensor, weight: Tensor, bias: Tensor | None = None, **_options: Any) -> str | None:
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        return "bfloat16 around the products only"
    if any(width % MULTIPLE for width in weight.shape[-2:]):
        return f"widths that are multiples of {MULTIPLE} only"
    if not _has_narrow_products(x.device):
        return "the chip has no such products"
    return reason_against(x, weight, bias)


IMPLEMENTATIONS = (
    Implementation(
        operator="narrow_linear", name="scaled_mm", function=narrow_linear, devices=("cuda",),
        supports=_supports, rank=20, needs="triton",
    ),
    Implementation(
        operator="narrow_grouped_linear", name="scaled_grouped_mm", devices=("cuda",),
        function=narrow_grouped_linear, supports=_supports_grouped, rank=20, needs="triton",
    ),
)  # fmt: skip
