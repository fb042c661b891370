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
from tutti.accelerator.gradients import WeightGradients
from tutti.accelerator.reference.narrow import NARROW, NarrowLinear
from tutti.accelerator.registry import Implementation

BLOCK = 4096
TILE = 64
MULTIPLE = 16  # of both widths, which the products ask for


@triton.jit
def _narrow_rows(
    x, columns, out, scales, width, x_step, HAS_COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write a row in 8 bits and its scale; each column is multiplied before, if that is given."""
    row = tl.program_id(0).to(tl.int64)
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
def _narrow_transpose(weight, scales, out, rows, width, step, TILE: tl.constexpr):
    """Write a tile of the transpose in 8 bits, by scales that are known."""
    row = tl.program_id(1) * TILE + tl.arange(0, TILE)
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    at = row.to(tl.int64)[:, None] * step + column[None, :]
    value = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(scales + row, mask=row < rows, other=1.0)
    value = tl.trans(value * (1.0 / scale)[:, None])
    to = column.to(tl.int64)[:, None] * rows + row[None, :]
    tl.store(out + to, value.to(out.dtype.element_ty), mask=tl.trans(inside))


def narrowed(x: Tensor, columns: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return rows in 8 bits, and the power of two that each was divided by."""
    count, width = x.shape
    out = torch.empty((count, width), dtype=NARROW, device=x.device)
    scales = torch.empty(count, dtype=torch.float32, device=x.device)
    _narrow_rows[(count,)](
        x, scales if columns is None else columns, out, scales, width, x.stride(0),
        HAS_COLUMNS=columns is not None, BLOCK=min(BLOCK, power_of_two(width)), num_warps=8,
    )  # fmt: skip
    return out, scales


def narrowed_transpose(weight: Tensor, scales: Tensor) -> Tensor:
    """Return the transpose in 8 bits, each column of it divided by its scale."""
    rows, width = weight.shape
    out = torch.empty((width, rows), dtype=NARROW, device=weight.device)
    _narrow_transpose[(triton.cdiv(width, TILE), triton.cdiv(rows, TILE))](
        weight, scales, out, rows, width, weight.stride(0), TILE=TILE, num_warps=4
    )
    return out


class ScaledProducts:
    """torch's scaled products; the input's gradient is summed more carefully."""

    def forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return x·Wᵀ, and the scales of W's rows."""
        (own, own_scales), (other, scales) = narrowed(x), narrowed(weight)
        y = torch._scaled_mm(
            own, other.t(), own_scales.unsqueeze(1), scales.unsqueeze(0), out_dtype=x.dtype,
            use_fast_accum=True,
        )  # fmt: skip
        return y, scales

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


def narrow_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, later: WeightGradients | None = None
) -> Tensor:
    """Return x·Wᵀ + b of products in 8 bits."""
    y: Tensor = NarrowLinear.apply(x, weight, bias, later, ScaledProducts())
    return y


@functools.cache
def _has_narrow_products(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


def _supports(x: Tensor, weight: Tensor, bias: Tensor | None = None, **_options: Any) -> str | None:
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        return "bfloat16 around the products only"
    if any(width % MULTIPLE for width in weight.shape):
        return f"widths that are multiples of {MULTIPLE} only"
    if not _has_narrow_products(x.device):
        return "the chip has no such products"
    return reason_against(x, weight, bias)


IMPLEMENTATIONS = (
    Implementation(
        operator="narrow_linear", name="scaled_mm", function=narrow_linear, devices=("cuda",),
        supports=_supports, rank=20, needs="triton",
    ),
)  # fmt: skip
