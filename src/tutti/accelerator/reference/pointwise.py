"""Rotary positions and activations in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tutti.accelerator.reference.norm import rms_norm
from tutti.models.parts import Activation


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate the first 2·cos.shape[-1] dimensions of each head: x (T, heads, width), cos (T, d/2).

    Pairs are (i, i + d/2), or neighbours when interleaved. Done in the dtype of x.
    """
    cos, sin = cos.unsqueeze(-2).to(x.dtype), sin.unsqueeze(-2).to(x.dtype)
    width = 2 * cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    if interleaved:
        first, second = turned[..., ::2], turned[..., 1::2]
        pair = (first * cos - second * sin, second * cos + first * sin)
        rotated = torch.stack(pair, dim=-1).flatten(-2)
    else:
        first, second = turned.chunk(2, dim=-1)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated if not rest.shape[-1] else torch.cat((rotated, rest), dim=-1)


def split_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    heads: int,
    kv_heads: int,
    interleaved: bool = False,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
    unit_offset: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and keys and values of x (T, heads + 2·kv_heads, width).

    Queries and keys are normed head by head where weights are given, then rotated.
    """
    q, k, v = x.split([heads, kv_heads, kv_heads], dim=1)
    if query_norm is not None:
        q = rms_norm(q, query_norm, eps=eps, unit_offset=unit_offset)
    if key_norm is not None:
        k = rms_norm(k, key_norm, eps=eps, unit_offset=unit_offset)
    both = rotary(torch.cat((q, k), dim=1), cos, sin, interleaved=interleaved)
    return *both.split([heads, kv_heads], dim=1), v


def activation(x: Tensor, *, kind: Activation) -> Tensor:
    """Return the non-linearity of each element."""
    match kind:
        case Activation.SILU:
            return functional.silu(x)
        case Activation.GELU:
            return functional.gelu(x)
        case Activation.GELU_TANH:
            return functional.gelu(x, approximate="tanh")
        case Activation.QUICK_GELU:
            return x * torch.sigmoid(1.702 * x)
        case Activation.RELU:
            return functional.relu(x)
        case Activation.RELU2:
            return functional.relu(x).square()
        case Activation.CLAMPED_SWIGLU:
            raise ValueError("the clamped SwiGLU is gated: call gated_activation")


def gated_activation(
    x: Tensor, *, kind: Activation, alpha: float = 1.702, limit: float = 7.0
) -> Tensor:
    """Return act(gate) · up of x (…, 2·F), whose first half is the gate.

    `alpha` and `limit` are those of the clamped SwiGLU.
    """
    gate, up = x.chunk(2, dim=-1)
    if kind is Activation.CLAMPED_SWIGLU:
        gate = gate.clamp(max=limit)
        up = up.clamp(-limit, limit)
        return (up + 1) * (gate * torch.sigmoid(alpha * gate))
    return activation(gate, kind=kind) * up
