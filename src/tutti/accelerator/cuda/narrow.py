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
from tutti.accelerator.cuda.narrow_columns import narrowed_columns, scale_and_inverse, turned
from tutti.accelerator.gradients import WeightGradients
from tutti.accelerator.reference.narrow import MULTIPLE, NARROW, Narrow, NarrowLinear
from tutti.accelerator.registry import Implementation

BLOCK = 4096
WHOLE = 32768  # elements of a row that a program keeps at hand
TILE = 64


@triton.jit
def _narrow_rows(
    x, columns, ends, out, scales, width, x_step, num_experts, HAS_COLUMNS: tl.constexpr,
    EXPERTS: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
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
    place = tl.arange(0, BLOCK)
    if WHOLE:
        value = tl.load(x + place, mask=place < width, other=0.0).to(tl.float32)
        if HAS_COLUMNS:
            value *= tl.load(columns + place, mask=place < width, other=0.0).to(tl.float32)
        scale, inverse = scale_and_inverse(tl.max(tl.abs(value), 0))
        tl.store(out + place, (value * inverse).to(out.dtype.element_ty), mask=place < width)
    else:
        largest = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, width, BLOCK):
            inside = start + place < width
            value = tl.load(x + start + place, mask=inside, other=0.0).to(tl.float32)
            if HAS_COLUMNS:
                value *= tl.load(columns + start + place, mask=inside, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(value))
        scale, inverse = scale_and_inverse(tl.max(largest, 0))
        for start in range(0, width, BLOCK):
            inside = start + place < width
            value = tl.load(x + start + place, mask=inside, other=0.0).to(tl.float32)
            if HAS_COLUMNS:
                value *= tl.load(columns + start + place, mask=inside, other=0.0).to(tl.float32)
            value = (value * inverse).to(out.dtype.element_ty)
            tl.store(out + start + place, value, mask=inside)
    tl.store(scales + row, scale)


@triton.jit
def _narrow_transpose(weight, scales, out, rows, width, step, TILE: tl.constexpr):
    """Write a tile of the transpose in 8 bits, by scales of rows that are known."""
    expert = tl.program_id(2).to(tl.int64)
    weight += expert * rows * step
    scales += expert * rows
    out += expert * rows * width
    row = tl.program_id(1) * TILE + tl.arange(0, TILE)
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    at = row.to(tl.int64)[:, None] * step + column[None, :]
    value = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    value *= (1.0 / tl.load(scales + row, mask=row < rows, other=1.0))[:, None]
    value = tl.trans(value)
    to = column.to(tl.int64)[:, None] * rows + row[None, :]
    tl.store(out + to, value.to(out.dtype.element_ty), mask=tl.trans(inside))


def narrowed(x: Tensor, columns: Tensor | None = None, ends: Tensor | None = None) -> Narrow:
    """Return rows in 8 bits, and the power of two that each was divided by.

    With `columns`, powers of two, each is multiplied by its own before; with `ends` each expert
    has its own.
    """
    count, width = x.shape
    whole = width <= WHOLE
    block = power_of_two(width) if whole else BLOCK
    if columns is not None:
        columns = columns.to(torch.bfloat16)  # exact, and half of what every row reads
    out = torch.empty((count, width), dtype=NARROW, device=x.device)
    scales = torch.empty(count, dtype=torch.float32, device=x.device)
    _narrow_rows[(count,)](
        x, scales if columns is None else columns, scales if ends is None else ends, out, scales,
        width, x.stride(0), 0 if ends is None else len(ends), HAS_COLUMNS=columns is not None,
        EXPERTS=0 if ends is None else power_of_two(len(ends)), WHOLE=whole, BLOCK=block,
        num_warps=16 if block > 2 * BLOCK else 8,
    )  # fmt: skip
    return Narrow(out, scales)


def narrowed_transpose(weight: Tensor, scales: Tensor) -> Tensor:
    """Return the transpose, or each expert's, in 8 bits, its columns divided by their scales."""
    *experts, rows, width = weight.shape
    out = torch.empty((*experts, width, rows), dtype=NARROW, device=weight.device)
    grid = (triton.cdiv(width, TILE), triton.cdiv(rows, TILE), *(experts or (1,)))
    _narrow_transpose[grid](
        weight, scales, out, rows, width, weight.stride(-2), TILE=TILE, num_warps=4
    )
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
        own, _ = narrowed_columns(gradient.contiguous(), x.scales)
        ones = torch.ones((1, x.values.shape[1]), dtype=torch.float32, device=gradient.device)
        product = torch._scaled_mm(
            own.values, turned(x.values).t(), own.scales.unsqueeze(1), ones,
            out_dtype=gradient.dtype, use_fast_accum=False,
        )  # fmt: skip
        return product.to(dtype)


def narrow_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, later: WeightGradients | None = None
) -> Tensor:
    """Return x·Wᵀ + b of products in 8 bits."""
    y: Tensor = NarrowLinear.apply(x, weight, bias, later, ScaledProducts())
    return y


@functools.cache
def has_narrow_products(device: torch.device) -> bool:
    """Tell whether a chip's matrix units multiply in 8 bits."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


def supports(x: Tensor, weight: Tensor, bias: Tensor | None = None, **_options: Any) -> str | None:
    """Say why a product is not made here, or None."""
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        return "bfloat16 around the products only"
    if any(width % MULTIPLE for width in weight.shape[-2:]):
        return f"widths that are multiples of {MULTIPLE} only"
    if not has_narrow_products(x.device):
        return "the chip has no such products"
    return reason_against(x, weight, bias)


IMPLEMENTATIONS = (
    Implementation(
        operator="narrow_linear", name="scaled_mm", function=narrow_linear, devices=("cuda",),
        supports=supports, rank=20, needs="triton",
    ),
)  # fmt: skip
