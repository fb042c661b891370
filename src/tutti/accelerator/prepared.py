"""Products with weights that never change again, laid out as the host multiplies them fastest.

A trained weight is (out, in). Of few rows the host's product with it is held up by the layout, not
by memory: narrow outputs go faster with the transpose, wide ones with oneDNN's own blocks. The
original stays, for whoever reads it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tutti.accelerator.gradients import WeightGradients
from tutti.accelerator.products import widens
from tutti.accelerator.registry import Implementation, register

WIDE = 2048  # outputs
BLOCK_ROWS = 32  # rows that blocks are laid out for; others go through them as well
_TRANSPOSED, _BLOCKED = "_tutti_transposed", "_tutti_blocked"


def prepare(weight: Tensor) -> None:
    """Lay a weight out; nothing happens where the host has no faster form of it."""
    if weight.device.type != "cpu" or weight.dim() != 2 or widens(weight):
        return
    if weight.shape[0] < WIDE:
        setattr(weight, _TRANSPOSED, weight.detach().t().contiguous())
    elif torch.backends.mkldnn.is_available() and weight.dtype != torch.float64:
        blocked = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), BLOCK_ROWS)
        setattr(weight, _BLOCKED, blocked)


def supports(x: Tensor, weight: Tensor, bias: Tensor | None = None, **_options: Any) -> str | None:
    """Say why a call cannot go through it."""
    del bias
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return "no gradients"
    if x.dim() != 2 or x.dtype != weight.dtype:
        return "rows of the weight's own dtype only"
    if not (hasattr(weight, _TRANSPOSED) or hasattr(weight, _BLOCKED)):
        return "the weight is not prepared"
    return None


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, later: WeightGradients | None = None
) -> Tensor:
    """Return x·Wᵀ + b."""
    del later
    transposed: Tensor | None = getattr(weight, _TRANSPOSED, None)
    if transposed is not None:
        return x @ transposed if bias is None else torch.addmm(bias, x, transposed)
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
