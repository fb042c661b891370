"""Products with weights that never change again, laid out as the host multiplies them fastest.

A trained weight is (out, in). What holds up the host's product of a few rows with it is how it lies
in memory: oneDNN's own blocks are read once, in order, and as halves (float16) there are half as
many bytes to read. Halves are widened in registers and multiplied in float32, so that they change
nothing where every number of a weight is one already: weights that were trained in bfloat16 or
float16 are. Hundreds of rows go as fast with the original, which stays.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tutti.accelerator.gradients import WeightGradients
from tutti.accelerator.products import widens
from tutti.accelerator.registry import Implementation, register

BLOCK_ROWS = 32  # rows that blocks are laid out for; others go through them as well
FEW, MANY = 2, 257  # rows of float32 up to which, and from which on, the original is as fast
_BLOCKED, _HALVES = "_tutti_blocked", "_tutti_halves"
_MULTIPLIES_HALVES = ("x86", "fbgemm")  # torch's engines that do


def prepare(weight: Tensor, *, halves: bool = False) -> None:
    """Lay a weight out; nothing happens where the host has no faster form of it.

    `halves`: as halves, if all its numbers are some; packing them takes seconds per hundred million
    on one thread, so that whoever wants to start fast leaves it.
    """
    if weight.device.type != "cpu" or weight.dim() != 2 or widens(weight):
        return
    plain = weight.detach()
    if halves and has_halves() and _are_halves(plain):
        setattr(weight, _HALVES, torch.ops.quantized.linear_prepack_fp16(plain, None))
    elif torch.backends.mkldnn.is_available() and weight.dtype != torch.float64:
        blocked = torch.ops.mkldnn._reorder_linear_weight(plain, BLOCK_ROWS)
        setattr(weight, _BLOCKED, blocked)


@functools.cache
def has_halves() -> bool:
    """Tell whether the host multiplies numbers of float32 with weights that lie there as halves."""
    return torch.backends.quantized.engine in _MULTIPLIES_HALVES


def round_to_halves(weight: Tensor) -> bool:
    """Let every number of a weight be the nearest half; False if one is beyond them: all stay."""
    halves = weight.detach().half()
    if not torch.isfinite(halves).all():
        return False
    weight.data.copy_(halves)
    return True


def _are_halves(weight: Tensor) -> bool:
    """Tell whether all numbers of a weight are halves."""
    if weight.dtype is not torch.float32:
        return False
    row = weight[0]
    return torch.equal(row.half().float(), row) and torch.equal(weight.half().float(), weight)


def supports(x: Tensor, weight: Tensor, bias: Tensor | None = None, **_options: Any) -> str | None:
    """Say why a call cannot go through it."""
    del bias
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return "no gradients"
    if x.dim() != 2 or x.dtype != weight.dtype:
        return "rows of the weight's own dtype only"
    if not hasattr(weight, _BLOCKED) and not hasattr(weight, _HALVES):
        return "the weight is not prepared"
    return None


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, later: WeightGradients | None = None
) -> Tensor:
    """Return x·Wᵀ + b."""
    del later
    y: Tensor
    halves = getattr(weight, _HALVES, None)
    if halves is not None and 0 < x.shape[0] < MANY:
        y = torch.ops.quantized.linear_dynamic_fp16(x, halves)
        return y if bias is None else y.add_(bias)
    if halves is not None or (x.dtype is torch.float32 and not FEW < x.shape[0] < MANY):
        return functional.linear(x, weight, bias)
    y = torch.ops.mkldnn._linear_pointwise(x, getattr(weight, _BLOCKED), bias, "none", [], "")
    return y


register(
    Implementation(
        operator="linear",
        name="prepared",
        function=linear,
        devices=("cpu",),
        supports=supports,
        rank=20,
        exact=False,
    )
)
