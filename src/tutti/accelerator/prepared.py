"""Products with weights that never change again, laid out as the host multiplies them fastest.

A trained weight is (out, in). What holds up the host's product of a few rows with it is the layout,
not memory: oneDNN's own blocks read it once, in order. One or two rows, and hundreds, go as fast
with the original, which stays.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tutti.accelerator.gradients import WeightGradients
from tutti.accelerator.products import widens
from tutti.accelerator.registry import Implementation, register

BLOCK_ROWS = 32  # rows that blocks are laid out for; others go through them as well
FEW, MANY = 2, 257  # rows of float32 up to which, and from which on, the original is as fast
_BLOCKED = "_tutti_blocked"


def prepare(weight: Tensor) -> None:
    """Lay a weight out; nothing happens where the host has no faster form of it."""
    if weight.device.type != "cpu" or weight.dim() != 2 or widens(weight):
        return
    if torch.backends.mkldnn.is_available() and weight.dtype != torch.float64:
        blocked = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), BLOCK_ROWS)
        setattr(weight, _BLOCKED, blocked)


def supports(x: Tensor, weight: Tensor, bias: Tensor | None = None, **_options: Any) -> str | None:
    """Say why a call cannot go through it."""
    del bias
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return "no gradients"
    if x.dim() != 2 or x.dtype != weight.dtype:
        return "rows of the weight's own dtype only"
    if not hasattr(weight, _BLOCKED):
        return "the weight is not prepared"
    return None


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, later: WeightGradients | None = None
) -> Tensor:
    """Return x·Wᵀ + b."""
    del later
    if x.dtype is torch.float32 and not FEW < x.shape[0] < MANY:
        return functional.linear(x, weight, bias)
    y: Tensor = torch.ops.mkldnn._linear_pointwise(
        x, getattr(weight, _BLOCKED), bias, "none", [], ""
    )
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
