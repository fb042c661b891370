"""AdamW in one pass over memory: gradient, master weight, both moments and the working copy.

The norm of all gradients comes before it, since nothing may be updated if it is not finite: a sum
of squares per program, then a sum of those, always in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tutti.accelerator.cuda.common import DTYPES, num_programs
from tutti.accelerator.memory_runs import common_runs
from tutti.accelerator.reference.optimizer import AdamSettings
from tutti.accelerator.registry import Implementation

BLOCK = 1024
NORM_BLOCK = 8192
NORM_PROGRAMS = 4  # per processor
LARGE = 1 << 20  # elements of a tensor that is worth a kernel of its own


@triton.jit
def _adamw(
    weight, gradient, mean, square, copy, factor, run, weight_step, gradient_step, mean_step,
    square_step, copy_step, rate, beta1, beta2, eps, decay, correction1, root_correction2,
    HAS_FACTOR: tl.constexpr, HAS_COPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < run
    row = tl.program_id(1).to(tl.int64)
    weight += row * weight_step
    gradient += row * gradient_step
    mean += row * mean_step
    square += row * square_step
    copy += row * copy_step
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
    targets = weights if copies is None else copies
    for group in zip(weights, gradients, means, squares, targets, strict=True):
        runs = common_runs(group)
        assert runs is not None, "the call was supported"
        if not runs.length:
            continue
        _adamw[(triton.cdiv(runs.length, BLOCK), runs.number)](
            *group, group[0] if gradient_factor is None else gradient_factor,
            runs.length, *runs.steps, *constants,
            HAS_FACTOR=gradient_factor is not None, HAS_COPY=copies is not None, BLOCK=BLOCK,
            num_warps=4,
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
    for group in zip(weights, gradients, means, squares, copies or weights, strict=True):
        if common_runs(group) is None:
            return "tensors that do not lie in the same runs of memory"
    return None


@triton.jit
def _squares(x, sums, run, row_step, count, BLOCK: tl.constexpr):
    program, step = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    collected = tl.zeros((BLOCK,), tl.float32)
    blocks = tl.cdiv(run, BLOCK)
    for block in range(program, blocks * count, step):
        places = (block % blocks) * BLOCK + tl.arange(0, BLOCK)
        own = x + (block // blocks) * row_step
        values = tl.load(own + places, mask=places < run, other=0.0).to(tl.float32)
        collected += values * values
    tl.store(sums + program, tl.sum(collected, axis=0))


def squared_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of all elements."""
    large = [t for t in tensors if t.numel() >= LARGE and common_runs((t,)) is not None]
    chosen = set(map(id, large))
    small = [t for t in tensors if id(t) not in chosen]
    total = torch.zeros((), dtype=torch.float32, device=tensors[0].device)
    if small:
        total += torch.stack(torch._foreach_norm(small, 2.0, dtype=torch.float32)).square().sum()
    if large:
        programs = num_programs(large[0], NORM_PROGRAMS)
        sums = torch.empty((len(large), programs), dtype=torch.float32, device=total.device)
        for tensor, own in zip(large, sums, strict=True):
            runs = common_runs((tensor,))
            assert runs is not None, "chosen by it"
            _squares[(programs,)](
                tensor, own, runs.length, *runs.steps, runs.number, BLOCK=NORM_BLOCK, num_warps=8
            )
        total += sums.sum()
    return total


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
        operator="squared_norm", name="triton", function=squared_norm, devices=("cuda",),
        supports=_supports_norm, rank=20, needs="triton",
    ),
)  # fmt: skip
