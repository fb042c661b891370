"""Products with quantised weights in plain torch: dequantise, then multiply."""

from __future__ import annotations

import torch
from torch import Tensor

from tutti.accelerator.products import linear_product
from tutti.accelerator.quantised.weight import QuantisedWeight
from tutti.accelerator.reference.narrow import narrowed


def quantised_linear(x: Tensor, weight: QuantisedWeight, bias: Tensor | None = None) -> Tensor:
    """Return x·Wᵀ + b."""
    if weight.narrow_inputs:
        x = narrowed(x.reshape(-1, x.shape[-1])).wide(x.dtype).view(x.shape)
    return linear_product(x, weight.dequantised(x.dtype), bias)


def quantised_grouped_linear(
    x: Tensor, weight: QuantisedWeight, counts: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Return each run of rows times its own expert's weight, as `grouped_linear` does."""
    runs = [
        quantised_linear(run, weight.expert(e), None if bias is None else bias[e])
        for e, run in enumerate(x.split(counts.tolist()))
        if run.shape[0]
    ]
    return torch.cat(runs) if runs else x.new_zeros(0, weight.shape[-2])
