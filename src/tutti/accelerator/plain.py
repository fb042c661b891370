"""torch's own fused operators where they keep to the reference's precision.

torch's own embedding and layer_norm sum gradients of half precision in float32 on some devices and
in half precision on others, the host among them: there only the wider dtypes go through.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tutti.accelerator.gradients import WeightGradients
from tutti.accelerator.products import HALF
from tutti.accelerator.reference.linear import later_embedding
from tutti.accelerator.registry import Implementation, register

SUM_WIDE = ("cuda",)  # where gradients are known to be summed in float32


def _sums_wide(tensor: Tensor, dtype: torch.dtype) -> str | None:
    if dtype in HALF and tensor.device.type not in SUM_WIDE and torch.is_grad_enabled():
        name = str(dtype).removeprefix("torch.")
        return f"torch may sum gradients of {name} in {name} on {tensor.device.type}"
    return None


def embedding(tokens: Tensor, table: Tensor, *, later: WeightGradients | None = None) -> Tensor:
    """Look rows up as the reference does."""
    if later is not None and torch.is_grad_enabled():
        return later_embedding(tokens, table, later, _table_gradient)
    rows = functional.embedding(tokens.clamp_min(0), table)
    return rows.masked_fill((tokens < 0).unsqueeze(-1), 0.0)


def _table_gradient(tokens: Tensor, gradient: Tensor, table: Tensor) -> Tensor:
    """Return the whole gradient of a table, added up in the same order every time."""
    dense: Tensor = torch.ops.aten.embedding_dense_backward(
        gradient, tokens, table.shape[0], -1, False
    )
    return dense


def _supports_embedding(tokens: Tensor, table: Tensor, **_options: Any) -> str | None:
    return _sums_wide(tokens, table.dtype)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float) -> Tensor:
    """Normalize as the reference does."""
    return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float
) -> tuple[Tensor, Tensor]:
    """Add and normalize as the reference does."""
    total = x + residual
    return layer_norm(total, weight, bias, eps=eps), total


def _supports_layer_norm(x: Tensor, *_others: Any, **_options: Any) -> str | None:
    return _sums_wide(x, x.dtype)


register(
    Implementation(
        operator="embedding", name="torch", function=embedding, supports=_supports_embedding, rank=1
    ),
    Implementation(
        operator="layer_norm",
        name="torch",
        function=layer_norm,
        supports=_supports_layer_norm,
        rank=1,
    ),
    Implementation(
        operator="add_layer_norm",
        name="torch",
        function=add_layer_norm,
        supports=_supports_layer_norm,
        rank=1,
    ),
)
