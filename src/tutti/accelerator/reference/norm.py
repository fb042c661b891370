"""RMSNorm and LayerNorm in plain torch; statistics are taken in float32."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor | None, *, eps: float, unit_offset: bool = False) -> Tensor:
    """Return x ÷ rms(x) · weight; with `unit_offset` the factor is 1 + weight, in float32."""
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return normed.to(x.dtype)
    if unit_offset:
        return (normed * (1.0 + weight.to(wide.dtype))).to(x.dtype)
    return weight * normed.to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float) -> Tensor:
    """Return (x − mean) ÷ deviation · weight + bias; its gradients are summed in float32, too."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    weight = None if weight is None else weight.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    return functional.layer_norm(x.to(dtype), x.shape[-1:], weight, bias, eps).to(x.dtype)


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    *,
    eps: float,
    unit_offset: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the norm of x + residual, and the sum itself; x where there is no residual."""
    total = x if residual is None else x + residual
    return rms_norm(total, weight, eps=eps, unit_offset=unit_offset), total


def add_layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, *, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the norm of x + residual, and the sum itself; x where there is no residual."""
    total = x if residual is None else x + residual
    return layer_norm(total, weight, bias, eps=eps), total
