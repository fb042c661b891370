"""Products with quantised weights in plain torch: dequantise, then multiply."""

from __future__ import annotations

import torch
from torch import Tensor

from tutti.accelerator.products import linear_product
from tutti.accelerator.quantised.weight import QuantisedWeight
from tutti.accelerator.reference.narrow import NarrowRows, narrowed


def quantised_linear(
    x: Tensor | NarrowRows, weight: QuantisedWeight, bias: Tensor | None = None
) -> Tensor:
    """Return x·Wᵀ + b."""
    x = as_multiplied(x, weight)
    return linear_product(x, weight.dequantised(x.dtype), bias)


def as_multiplied(x: Tensor | NarrowRows, weight: QuantisedWeight) -> Tensor:
    """Return rows as a weight sees them: rounded, where it asks for it."""
    if isinstance(x, NarrowRows):
        return x.wide()
    if not weight.narrow_inputs:
        return x
    return narrowed(x.reshape(-1, x.shape[-1])).wide(x.dtype).view(x.shape)


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
