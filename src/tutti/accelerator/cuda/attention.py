"""Attention through one named back end of torch's, and of many segments through its varlen kernel.

Which back end is fastest depends on shape and direction, so each is an implementation of its own.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tutti.accelerator import scaled_dot_product
from tutti.accelerator.key_runs import followed, scattered
from tutti.accelerator.registry import Implementation
from tutti.accelerator.segments import Segments

_HALF = (torch.bfloat16, torch.float16)
WIDEST_HEAD = 256
WIDE_HEADS_SINCE = 91900  # cuDNN's version that was measured and checked, on Hopper


def _through(backend: SDPBackend, *args: Any, **options: Any) -> Tensor:
    with sdpa_kernel(backend):
        return scaled_dot_product.attention(*args, **options)


def _supports_fused(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, **options: Any
) -> str | None:
    reason = scaled_dot_product.supports(q, k, v, segments, **options)
    if reason is not None:
        return reason
    if q.dtype not in _HALF:
        return "bfloat16 and float16 only"
    if not segments.is_batch:
        return "whole sequences of one length only"
    window = options.get("window")
    if window is not None and window < segments.keys[0]:
        return "no window"
    if q.shape[-1] > WIDEST_HEAD or q.shape[-1] % 8 or v.shape[-1] % 8:
        return f"heads of a multiple of 8, up to {WIDEST_HEAD}, only"
    return None


def _supports_flash(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, **options: Any
) -> str | None:
    if q.shape[-1] != v.shape[-1]:
        return "keys and values of one width only"
    return _supports_fused(q, k, v, segments, **options)


@functools.cache
def _cudnn_differentiates_wide(device: torch.device) -> bool:
    """Tell whether cuDNN has gradients of heads up to 256 wide (192 and 128 of latent ones)."""
    version = torch.backends.cudnn.version() or 0
    return version >= WIDE_HEADS_SINCE and torch.cuda.get_device_capability(device) >= (9, 0)


def _supports_cudnn(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, **options: Any
) -> str | None:
    wide = max(q.shape[-1], v.shape[-1]) > 128
    if wide and (q.requires_grad or k.requires_grad) and not _cudnn_differentiates_wide(q.device):
        return "gradients of heads up to 128 wide only, with this cuDNN on this chip"
    if segments.is_batch and segments.queries[0] == 1:
        return "sequences of two tokens or more only"
    return _supports_fused(q, k, v, segments, **options)


def varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    **_options: Any,
) -> Tensor:
    """Return attention of segments of any lengths in one kernel."""
    from torch.nn.attention.varlen import varlen_attn

    k, v, segments = followed(k, v, segments)
    q, k, v = (scaled_dot_product.aligned(tensor) for tensor in (q, k, v))
    starts_q, starts_k = segments.boundaries(q.device)
    left = -1 if window is None else window - 1
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    y = varlen_attn(
        q,
        k,
        v,
        starts_q,
        starts_k,
        max(segments.queries),
        max(segments.keys),
        scale=scale,
        window_size=(left, 0 if causal else -1),
    )
    assert isinstance(y, Tensor), "no auxiliary output was asked for"
    return y


def _supports_varlen(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, **options: Any
) -> str | None:
    del k
    for name in ("soft_cap", "sinks", "key_bias"):
        if options.get(name) is not None:
            return f"no {name.replace('_', ' ')}"
    if q.dtype not in _HALF:
        return "bfloat16 and float16 only"
    reason = scattered(segments)
    if reason is not None:
        return reason
    if options.get("window") is not None and options.get("window_kind") == "chunked":
        return "no chunked windows"
    if q.shape[-1] != v.shape[-1] or q.shape[-1] % 8 or q.shape[-1] > WIDEST_HEAD:
        return f"heads of one width, a multiple of 8, up to {WIDEST_HEAD}, only"
    return "being compiled" if torch.compiler.is_compiling() else None


IMPLEMENTATIONS = (
    Implementation(
        operator="attention", name="cudnn", devices=("cuda",), supports=_supports_cudnn, rank=30,
        deterministic=False,
        function=functools.partial(_through, SDPBackend.CUDNN_ATTENTION),
    ),
    Implementation(
        operator="attention", name="flash", devices=("cuda",), supports=_supports_flash, rank=20,
        deterministic=False,
        function=functools.partial(_through, SDPBackend.FLASH_ATTENTION),
    ),
    Implementation(
        operator="attention", name="varlen", function=varlen, devices=("cuda",),
        supports=_supports_varlen, rank=15, deterministic=False,
    ),
)  # fmt: skip
