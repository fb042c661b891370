"""AdamW in one pass over memory: gradient, master weight, both moments and the working copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tutti.accelerator.cuda.common import DTYPES
from tutti.accelerator.reference.optimizer import AdamSettings
from tutti.accelerator.registry import Implementation

BLOCK = 4096


@triton.jit
def _adamw(
    weight, gradient, mean, square, copy, factor, size, rate, beta1, beta2, eps, decay,
    correction1, root_correction2,
    HAS_FACTOR: tl.constexpr, HAS_COPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    if HAS_FACTOR:
        scale = tl.load(factor)
        inside = inside & (scale == scale)  # not a number: everything stays as it is
    w = tl.load(weight + places, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gradient + places, mask=inside, other=0.0).to(tl.float32)
    if HAS_FACTOR:
        g = g * scale
    m = tl.load(mean + places, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(square + places, mask=inside, other=0.0).to(tl.float32)
    m = beta1 * m + (1.0 - beta1) * g
    v = beta2 * v + (1.0 - beta2) * g * g
    tl.store(mean + places, m, mask=inside)
    tl.store(square + places, v, mask=inside)
    w = w * decay - rate * (m / correction1) / (tl.sqrt(v) / root_correction2 + eps)
    tl.store(weight + places, w, mask=inside)
    if HAS_COPY:
        tl.store(copy + places, w, mask=inside)


@torch.no_grad()
def adamw(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    *,
    step: int,
    settings: AdamSettings,
    gradient_factor: Tensor | None = None,
    copies: Sequence[Tensor] | None = None,
) -> None:
    """Move the weights by one step, in place, unless the factor is not a number."""
    constants = (
        settings.learning_rate,
        settings.beta1,
        settings.beta2,
        settings.eps,
        1.0 - settings.learning_rate * settings.weight_decay,
        1.0 - settings.beta1**step,
        (1.0 - settings.beta2**step) ** 0.5,
    )
    for i, weight in enumerate(weights):
        size = weight.numel()
        if not size:
            continue
        _adamw[(triton.cdiv(size, BLOCK),)](
            weight, gradients[i], means[i], squares[i], weight if copies is None else copies[i],
            weight if gradient_factor is None else gradient_factor, size, *constants,
            HAS_FACTOR=gradient_factor is not None, HAS_COPY=copies is not None, BLOCK=BLOCK,
            num_warps=8,
        )  # fmt: skip


def _supports(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    *,
    copies: Sequence[Tensor] | None = None,
    **_options: Any,
) -> str | None:
    for tensor in (*weights, *gradients, *means, *squares, *(copies or ())):
        if tensor.dtype not in DTYPES:
            return f"no {str(tensor.dtype).removeprefix('torch.')}"
        if not tensor.is_contiguous():
            return "tensors that are not contiguous"
    return None


def squared_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of all elements, many tensors per kernel."""
    norms = torch._foreach_norm(list(tensors), 2.0, dtype=torch.float32)
    return torch.stack(norms).square().sum()


def _supports_norm(tensors: Sequence[Tensor]) -> str | None:
    if not tensors or any(t.dtype not in DTYPES for t in tensors):
        return "no tensors, or of another dtype than float32, bfloat16 and float16"
    return None


IMPLEMENTATIONS = (
    Implementation(
        operator="adamw", name="triton", function=adamw, devices=("cuda",), supports=_supports,
        rank=20, needs="triton",
    ),
    Implementation(
        operator="squared_norm", name="foreach", function=squared_norm, devices=("cuda",),
        supports=_supports_norm, rank=20,
    ),
)  # fmt: skip
