"""Products with weights of few bits that training only reads: QLoRA's base.

The weight is made wide for the time of each pass and never kept so; the gradient of the input is
the only one there is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tutti.accelerator.products import linear_product, product
from tutti.accelerator.quantised.weight import QuantisedWeight


def frozen_linear(x: Tensor, weight: QuantisedWeight, bias: Tensor | None = None) -> Tensor:
    """Return x·Wᵀ + b, differentiable in x; a bias is frozen with its weight."""
    y: Tensor = _FrozenLinear.apply(x, weight)
    return y if bias is None else y + bias


class _FrozenLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: QuantisedWeight) -> Tensor:
        ctx.weight, ctx.dtype = weight, x.dtype
        return linear_product(x, weight.dequantised(x.dtype), None)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return product(gradients[0], ctx.weight.dequantised(ctx.dtype)), None


def frozen_grouped_linear(
    x: Tensor, weight: QuantisedWeight, counts: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Return each run of rows times its own expert's weight, differentiable in x."""
    runs = [
        frozen_linear(run, weight.expert(e), None if bias is None else bias[e])
        for e, run in enumerate(x.split(counts.tolist()))
    ]
    return torch.cat(runs)
