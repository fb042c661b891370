"""Norms, rotary positions and SwiGLU through torch_npu.

As documented for torch_npu 7: `npu_rms_norm(self, gamma, epsilon) → (y, rstd)`, `npu_rotary_mul(
input, r1, r2, rotary_mode)` on four dimensions with tables as wide as the head, and `npu_swiglu(
self, dim)`, which gates with the first half; these three have gradients. `npu_add_rms_norm(x1, x2,
gamma, epsilon) → (y, rstd, sum)` is documented for inference: it is used where none are asked for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tutti.accelerator.registry import Implementation
from tutti.models.parts import Activation

DEVICES = ("npu",)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WIDEST_ROTARY, MOST_HEADS = 896, 1000  # both excluded


def plain_dtype(x: Tensor) -> str | None:
    """Say why a tensor's dtype is not taken."""
    return None if x.dtype in DTYPES else "float16, bfloat16 and float32 only"


def rms_norm(x: Tensor, weight: Tensor | None, *, eps: float, unit_offset: bool = False) -> Tensor:
    """Return x ÷ rms(x) · weight."""
    import torch_npu

    del unit_offset
    y: Tensor = torch_npu.npu_rms_norm(x, weight, epsilon=eps)[0]
    return y


def supports_rms_norm(
    x: Tensor, weight: Tensor | None, *, eps: float, unit_offset: bool = False
) -> str | None:
    """Say why a call is not taken."""
    del eps
    if weight is None:
        return "no norm without a weight"
    if unit_offset:
        return "no unit offset"
    if weight.dtype != x.dtype:
        return "weight of the input's dtype only"
    return plain_dtype(x) or _rows(x)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, *, eps: float, unit_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the norm of x + residual, and the sum."""
    import torch_npu

    del unit_offset
    y, _, total = torch_npu.npu_add_rms_norm(x, residual, weight, eps)
    return y, total


def supports_add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    *,
    eps: float,
    unit_offset: bool = False,
) -> str | None:
    """Say why a call is not taken."""
    if residual is None:
        return "no norm without a residual"
    trained = any(tensor is not None and tensor.requires_grad for tensor in (x, residual, weight))
    if torch.is_grad_enabled() and trained:
        return "no gradients"
    return supports_rms_norm(x, weight, eps=eps, unit_offset=unit_offset)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate the first 2·cos.shape[-1] dimensions of each head of x (T, heads, width)."""
    import torch_npu

    width = 2 * cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    tables = (_whole_width(table, interleaved).to(x.dtype) for table in (cos, sin))
    mode = "interleave" if interleaved else "half"
    # batch 1, then tokens, heads, width; the tables are shared by the heads
    y = torch_npu.npu_rotary_mul(
        turned.contiguous().unsqueeze(0), *(t[None, :, None, :] for t in tables), rotary_mode=mode
    ).squeeze(0)
    return y if not rest.shape[-1] else torch.cat((y, rest), dim=-1)


def _whole_width(table: Tensor, interleaved: bool) -> Tensor:
    """Return a table (T, d/2) with an entry for both parts of a pair (T, d)."""
    return table.repeat_interleave(2, -1) if interleaved else torch.cat((table, table), -1)


def supports_rotary(
    x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> str | None:
    """Say why a call is not taken."""
    del sin, interleaved
    if x.dim() != 3:
        return "tokens, heads and width only"
    if 2 * cos.shape[-1] >= WIDEST_ROTARY:
        return f"fewer than {WIDEST_ROTARY} rotated dimensions only"
    if x.shape[1] >= MOST_HEADS:
        return f"fewer than {MOST_HEADS} heads only"
    return plain_dtype(x) or _rows(x)


def gated_activation(
    x: Tensor, *, kind: Activation, alpha: float = 1.702, limit: float = 7.0
) -> Tensor:
    """Return silu(gate) · up of x (…, 2·F), whose first half is the gate."""
    import torch_npu

    del kind, alpha, limit
    y: Tensor = torch_npu.npu_swiglu(x, dim=-1)
    return y


def supports_gated(
    x: Tensor, *, kind: Activation, alpha: float = 1.702, limit: float = 7.0
) -> str | None:
    """Say why a call is not taken."""
    del alpha, limit
    return "SiLU only" if kind is not Activation.SILU else plain_dtype(x) or _rows(x)


def _rows(x: Tensor) -> str | None:
    return None if x.numel() else "no empty tensors"


def _of(operator: str, function: Any, supports: Any, **options: Any) -> Implementation:
    return Implementation(
        operator=operator, name="npu", function=function, supports=supports, devices=DEVICES,
        needs="torch_npu", rank=20, **options,
    )  # fmt: skip


IMPLEMENTATIONS = (
    _of("rms_norm", rms_norm, supports_rms_norm),
    _of("add_rms_norm", add_rms_norm, supports_add_rms_norm, exact=False),
    _of("rotary", rotary, supports_rotary),
    _of("gated_activation", gated_activation, supports_gated),
)
