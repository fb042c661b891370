"""What makes rows in 8 bits for a product, in plain torch: what comes before it, then rounded."""

from __future__ import annotations

from torch import Tensor

from tutti.accelerator.reference import norm, pointwise
from tutti.accelerator.reference.narrow import NarrowRows, narrowed
from tutti.models import Activation


def rounded(x: Tensor) -> NarrowRows:
    """Return rows in 8 bits."""
    return NarrowRows(*narrowed(x.reshape(-1, x.shape[-1])), x.dtype)


def narrow_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    *,
    eps: float,
    unit_offset: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the norm of x + residual in 8 bits, its rows' scales, and the sum."""
    y, total = norm.add_rms_norm(x, residual, weight, eps=eps, unit_offset=unit_offset)
    return *rounded(y)[:2], total


def narrow_gated_activation(
    x: Tensor, *, kind: Activation, alpha: float = 1.702, limit: float = 7.0
) -> tuple[Tensor, Tensor]:
    """Return act(gate) · up in 8 bits, and its rows' scales."""
    made = rounded(pointwise.gated_activation(x, kind=kind, alpha=alpha, limit=limit))
    return made.values, made.scales
