"""AdamW in one pass over memory: gradient, master weight, both moments and the working copy.

All tensors of a call go through one kernel: where they lie and which of their parts a program takes
stands in two small tables on the device, kept as long as the same addresses come again. The norm of
all gradients comes before the update, since nothing may be updated if it is not finite: a sum of
squares per program, then a sum of those, always in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tutti.accelerator.cuda.common import DTYPES, num_programs
from tutti.accelerator.reference.optimizer import AdamSettings
from tutti.accelerator.registry import Implementation
from tutti.accelerator.tensors.memory_runs import common_runs
from tutti.accelerator.tensors.tensor_tables import TensorTables

BLOCK = 1024
BLOCKS = 8  # of a part, which one program takes
PART = BLOCK * BLOCKS
NORM_PROGRAMS = 8  # per processor
TRITON = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
POINTERS = tl.constexpr(5)  # of a row of the table: then the run's length, then five steps
COLUMNS = tl.constexpr(11)
TABLES = TensorTables(columns=POINTERS.value, part=PART)


@triton.jit
def _place(own, row, NUMBER: tl.constexpr, KIND: tl.constexpr, IS_EVEN: tl.constexpr):
    """Return where a tensor's run begins."""
    base = tl.load(own + NUMBER).to(tl.pointer_type(KIND))
    place = base + row * tl.load(own + POINTERS + 1 + NUMBER)
    if IS_EVEN:
        place = tl.multiple_of(place, 16)
    return place


@triton.jit
def _adamw(
    table, parts, factor, rate, beta1, beta2, eps, decay, correction1, root_correction2,
    WEIGHT: tl.constexpr, GRADIENT: tl.constexpr, MEAN: tl.constexpr, SQUARE: tl.constexpr,
    COPY: tl.constexpr, HAS_FACTOR: tl.constexpr, HAS_COPY: tl.constexpr, IS_EVEN: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    part = parts + tl.program_id(0).to(tl.int64) * 3
    own = table + tl.load(part).to(tl.int64) * COLUMNS
    row, first = tl.load(part + 1).to(tl.int64), tl.load(part + 2).to(tl.int64)
    run = tl.load(own + POINTERS)
    scale = 1.0
    if HAS_FACTOR:
        scale = tl.load(factor)
        run = tl.where(scale == scale, run, 0)  # not a number: everything stays as it is
    if IS_EVEN:
        run = tl.multiple_of(run, 16)
    weight = _place(own, row, 0, WEIGHT, IS_EVEN)
    gradient = _place(own, row, 1, GRADIENT, IS_EVEN)
    mean = _place(own, row, 2, MEAN, IS_EVEN)
    square = _place(own, row, 3, SQUARE, IS_EVEN)
    copy = _place(own, row, 4, COPY, IS_EVEN)
    for block in range(BLOCKS):
        places = (first * BLOCKS + block) * BLOCK + tl.arange(0, BLOCK)
        inside = places < run
        w = tl.load(weight + places, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(gradient + places, mask=inside, other=0.0).to(tl.float32) * scale
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
    tables = TABLES.of(weights, gradients, means, squares, targets)
    assert tables is not None, "the call was supported"
    for alike, table, parts in tables:
        kinds = (TRITON[dtype] for dtype in alike.dtypes)
        _adamw[(parts.shape[0],)](
            table, parts, table if gradient_factor is None else gradient_factor, *constants,
            *kinds, HAS_FACTOR=gradient_factor is not None, HAS_COPY=copies is not None,
            IS_EVEN=alike.is_even, BLOCK=BLOCK, BLOCKS=BLOCKS, num_warps=4,
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
    tables = TABLES.of(weights, gradients, means, squares, copies or weights)
    if tables is None:
        return "tensors that do not lie in the same runs of memory"
    others = {dtype for table in tables for dtype in table.alike.dtypes} - set(DTYPES)
    return "no " + ", ".join(sorted(map(str, others))).replace("torch.", "") if others else None


@triton.jit
def _squares(
    table, parts, sums, count, KIND: tl.constexpr, IS_EVEN: tl.constexpr, PART: tl.constexpr
):  # fmt: skip
    collected = tl.zeros((PART,), tl.float32)
    for number in range(tl.program_id(0), count, tl.num_programs(0)):
        part = parts + number * 3
        own = table + tl.load(part).to(tl.int64) * COLUMNS
        run = tl.load(own + POINTERS)
        if IS_EVEN:
            run = tl.multiple_of(run, 16)
        x = _place(own, tl.load(part + 1).to(tl.int64), 0, KIND, IS_EVEN)
        places = tl.load(part + 2).to(tl.int64) * PART + tl.arange(0, PART)
        values = tl.load(x + places, mask=places < run, other=0.0).to(tl.float32)
        collected += values * values
    tl.store(sums + tl.program_id(0), tl.sum(collected, axis=0))


def squared_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of all elements."""
    total = torch.zeros((), dtype=torch.float32, device=tensors[0].device)
    tables = TABLES.of(tensors)
    if tables is None:  # some lie in no runs
        others = [tensor for tensor in tensors if common_runs((tensor,)) is None]
        total += torch.stack(torch._foreach_norm(others, 2.0, dtype=torch.float32)).square().sum()
        tables = TABLES.of([tensor for tensor in tensors if common_runs((tensor,)) is not None])
    for alike, table, parts in tables or ():
        programs = min(parts.shape[0], num_programs(tensors[0], NORM_PROGRAMS))
        sums = torch.empty(programs, dtype=torch.float32, device=total.device)
        _squares[(programs,)](
            table, parts, sums, parts.shape[0], KIND=TRITON[alike.dtypes[0]],
            IS_EVEN=alike.is_even, PART=PART, num_warps=8,
        )  # fmt: skip
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
