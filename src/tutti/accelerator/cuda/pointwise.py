"""Rotary positions and gated activations, each way in one pass over memory."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tutti.accelerator.cuda.common import power_of_two, reason_against, rows_of
from tutti.accelerator.cuda.early_launch import early, wait
from tutti.accelerator.cuda.placed_heads import supports_heads
from tutti.accelerator.registry import Implementation
from tutti.models.parts import Activation

# --- rotary ----------------------------------------------------------------------------------


@triton.jit
def _rotate(
    x, cos, sin, y, x_token, x_head, y_token, y_head, table_row, heads, half, width, sign,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, HALF)[None, :]
    inside = (head < heads) & (pair < half)
    c = tl.load(cos + token * table_row + pair, mask=pair < half, other=0.0).to(tl.float32)
    s = tl.load(sin + token * table_row + pair, mask=pair < half, other=0.0).to(tl.float32) * sign
    if INTERLEAVED:
        first_column, second_column = 2 * pair, 2 * pair + 1
    else:
        first_column, second_column = pair, pair + half
    source = x + token * x_token + head * x_head
    target = y + token * y_token + head * y_head
    first = tl.load(source + first_column, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + second_column, mask=inside, other=0.0).to(tl.float32)
    tl.store(target + first_column, first * c - second * s, mask=inside)
    tl.store(target + second_column, second * c + first * s, mask=inside)
    if REST > 0:
        column = 2 * half + tl.arange(0, REST)[None, :]
        kept = (head < heads) & (column < width)
        tl.store(target + column, tl.load(source + column, mask=kept), mask=kept)


def _run_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, sign: float) -> Tensor:
    tokens, heads, width = x.shape
    half = cos.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rest = width - 2 * half
    block = min(power_of_two(heads), 16)
    _rotate[(tokens, triton.cdiv(heads, block))](
        x, cos, sin, y, x.stride(0), x.stride(1), y.stride(0), y.stride(1), cos.stride(0), heads,
        half, width, sign, INTERLEAVED=interleaved, HEADS=block, HALF=power_of_two(half),
        REST=power_of_two(rest) if rest else 0, num_warps=4,
    )  # fmt: skip
    return y


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _run_rotary(x, cos, sin, interleaved, 1.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        cos, sin = ctx.saved_tensors
        gradient = _in_rows(gradients[0])
        return _run_rotary(gradient, cos, sin, ctx.interleaved, -1.0), None, None, None


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate the first dimensions of each head."""
    y: Tensor = _Rotary.apply(x, cos, sin, interleaved)
    return y


def _in_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


# --- gated activations -----------------------------------------------------------------------

CODES = {
    Activation.SILU: 0,
    Activation.GELU_TANH: 1,
    Activation.GELU: 2,
    Activation.CLAMPED_SWIGLU: 3,
    Activation.RELU: 4,
    Activation.RELU2: 5,
    Activation.QUICK_GELU: 6,
}


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _activate(gate, alpha, KIND: tl.constexpr):
    """Return the activation and its derivative."""
    if KIND == 0 or KIND == 3 or KIND == 6:
        open_ = tl.sigmoid(alpha * gate)
        value = gate * open_
        slope = open_ * (1.0 + alpha * gate * (1.0 - open_))
    elif KIND == 1:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        t = _tanh(inner)
        value = 0.5 * gate * (1.0 + t)
        slope = 0.5 * (1.0 + t) + 0.5 * gate * (1.0 - t * t) * 0.7978845608028654 * (
            1.0 + 3.0 * 0.044715 * gate * gate
        )
    elif KIND == 2:
        cdf = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
        value = gate * cdf
        slope = cdf + gate * 0.3989422804014327 * tl.exp(-0.5 * gate * gate)
    elif KIND == 4:
        value = tl.maximum(gate, 0.0)
        slope = tl.where(gate > 0, 1.0, 0.0)
    else:
        positive = tl.maximum(gate, 0.0)
        value = positive * positive
        slope = 2.0 * positive
    return value, slope


@triton.jit
def gated_row(x, columns, width, alpha, limit, dtype: tl.constexpr, KIND: tl.constexpr):
    """Return some columns of act(gate) · up, of a row [gate | up]."""
    inside = columns < width
    gate = tl.load(x + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + width + columns, mask=inside, other=0.0).to(tl.float32)
    if KIND == 3:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
    value, _ = _activate(gate, alpha, KIND)
    if KIND != 3:  # rounded as the composition rounds it
        value = value.to(dtype).to(tl.float32)
    return value * up


@triton.jit
def _gated_forward(
    x, y, x_row, width, alpha, limit,
    KIND: tl.constexpr, EARLY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = gated_row(x + row * x_row, columns, width, alpha, limit, y.dtype.element_ty, KIND)
    tl.store(y + row * width + columns, value, mask=columns < width)


@triton.jit
def _gated_backward(
    x, grad_y, grad_x, x_row, grad_row, width, alpha, limit,
    KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(x + row * x_row + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_row + width + columns, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(grad_y + row * grad_row + columns, mask=inside, other=0.0).to(tl.float32)
    gate_open, up_open = 1.0, 1.0
    if KIND == 3:
        gate_open = tl.where(gate <= limit, 1.0, 0.0)
        up_open = tl.where((up >= -limit) & (up <= limit), 1.0, 0.0)
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
    value, slope = _activate(gate, alpha, KIND)
    target = grad_x + row * 2 * width + columns
    tl.store(target, gradient * up * slope * gate_open, mask=inside)
    tl.store(target + width, gradient * value * up_open, mask=inside)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: Activation, alpha: float, limit: float) -> Tensor:
        rows = rows_of(x)
        count, width = rows.shape[0], rows.shape[1] // 2
        y = torch.empty((count, width), dtype=x.dtype, device=x.device)
        block = min(power_of_two(width), 2048)
        _gated_forward[(count, triton.cdiv(width, block))](
            rows, y, rows.stride(0), width, alpha, limit, KIND=CODES[kind], BLOCK=block,
            num_warps=4, **early(rows),
        )  # fmt: skip
        ctx.save_for_backward(rows)
        ctx.options, ctx.shape = (kind, alpha, limit, block), x.shape
        return y.view(*x.shape[:-1], width)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        (rows,) = ctx.saved_tensors
        kind, alpha, limit, block = ctx.options
        gradient = rows_of(gradients[0])
        if gradient.stride(-1) != 1:
            gradient = gradient.contiguous()
        count, width = gradient.shape
        grad_x = torch.empty((count, 2 * width), dtype=rows.dtype, device=rows.device)
        _gated_backward[(count, triton.cdiv(width, block))](
            rows, gradient, grad_x, rows.stride(0), gradient.stride(0), width, alpha, limit,
            KIND=CODES[kind], BLOCK=block, num_warps=4,
        )  # fmt: skip
        return grad_x.view(ctx.shape), None, None, None


def gated_activation(
    x: Tensor, *, kind: Activation, alpha: float = 1.702, limit: float = 7.0
) -> Tensor:
    """Return act(gate) · up."""
    y: Tensor = _Gated.apply(x, kind, slope_of(kind, alpha), limit)
    return y


def slope_of(kind: Activation, alpha: float) -> float:
    """Return what a gate is multiplied with inside its sigmoid."""
    return {Activation.SILU: 1.0, Activation.QUICK_GELU: 1.702}.get(kind, alpha)


def _supports_gated(x: Tensor, **_options: Any) -> str | None:
    return reason_against(x)


IMPLEMENTATIONS = (
    Implementation(
        operator="rotary", name="triton", function=rotary, devices=("cuda",),
        supports=supports_heads, rank=20, needs="triton",
    ),
    Implementation(
        operator="gated_activation", name="triton", function=gated_activation, devices=("cuda",),
        supports=_supports_gated, rank=20, needs="triton",
    ),
)  # fmt: skip
