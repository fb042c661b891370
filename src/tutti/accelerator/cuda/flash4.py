"""Attention through FlashAttention 4's kernels, where the package `flash-attn-4` is installed.

It compiles a kernel for each kind of call when the first one comes, which takes seconds, and needs
more of the host per call than the other back ends: where nothing hides that, small calls are
faster through those, which the table of measured choices says.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tutti.accelerator.key_runs import followed, scattered
from tutti.accelerator.registry import Implementation
from tutti.accelerator.scaled_dot_product import aligned
from tutti.accelerator.segments import Segments

LEAST_HEAD, WIDEST_HEAD = 32, 256
_HALF = (torch.bfloat16, torch.float16)
_CHIPS = 9  # the major version of the compute capability that it was checked on
_KEPT = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"  # compiled kernels, in files


@functools.cache
def installed() -> bool:
    """Tell whether the package is there; FlashAttention 2 has the same name and other files."""
    spec = importlib.util.find_spec("flash_attn")
    places = (spec.submodule_search_locations or ()) if spec is not None else ()
    there = any((Path(place) / "cute" / "interface.py").is_file() for place in places)
    return there and importlib.util.find_spec("cutlass") is not None


@functools.cache
def _kernels() -> Any:
    """Import the package, once: it takes seconds."""
    os.environ.setdefault(_KEPT, "1")
    with warnings.catch_warnings():  # of the compiler's own making
        warnings.simplefilter("ignore")
        from flash_attn.cute import interface
    return interface


def _called(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Return attention and, where it is asked for, the log-sum-exp (H, T)."""
    k, v, segments = followed(k, v, segments)
    q, k, v = aligned(q), aligned(k), aligned(v)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if segments.is_batch and not options.get("return_lse"):
            shape = (len(segments), segments.queries[0])
            parts = (tensor.unflatten(0, shape) for tensor in (q, k, v))
            both = _kernels().flash_attn_func(*parts, **options)
        else:
            starts_q, starts_k = segments.boundaries(q.device)
            both = _kernels().flash_attn_varlen_func(
                q, k, v, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k,
                max_seqlen_q=max(segments.queries), max_seqlen_k=max(segments.keys), **options,
            )  # fmt: skip
    y, lse = both if isinstance(both, tuple) else (both, None)
    return (y.flatten(0, 1) if y.dim() == 4 else y), lse


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    **_options: Any,
) -> Tensor:
    """Return (T, H, E), as the reference does."""
    near = window is not None and window < max(segments.keys)
    return _called(
        q, k, v, segments, softmax_scale=scale, causal=causal,
        window_size=(window - 1, 0) if near and window is not None else (None, None),
        softcap=soft_cap or 0.0, learnable_sink=sinks,
    )[0]  # fmt: skip


def attention_with_lse(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, *, scale: float, causal: bool = True
) -> tuple[Tensor, Tensor]:
    """Return attention and its log-sum-exp (T, H), both with gradients."""
    options = {"softmax_scale": scale, "causal": causal, "return_lse": True}
    y, lse_ht = _called(q, k, v, segments, **options)
    assert lse_ht is not None, "it was asked for"
    return y, lse_ht.t()


@functools.cache
def _checked_on(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == _CHIPS


def _supports(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments,
    *,
    causal: bool = True,
    window: int | None = None,
    window_kind: str = "sliding",
    key_bias: Tensor | None = None,
    **_options: Any,
) -> str | None:
    del k
    if key_bias is not None:
        return "no key bias"
    if window is not None and (window_kind != "sliding" or not causal):
        return "sliding windows of causal attention only"
    if q.dtype not in _HALF:
        return "bfloat16 and float16 only"
    widths = (q.shape[-1], v.shape[-1])
    if min(widths) < LEAST_HEAD or max(widths) > WIDEST_HEAD or any(w % 16 for w in widths):
        return f"heads of a multiple of 16, from {LEAST_HEAD} to {WIDEST_HEAD}, only"
    if not _checked_on(q.device):
        return "Hopper only"
    return "being compiled" if torch.compiler.is_compiling() else scattered(segments)


IMPLEMENTATIONS = (
    Implementation(
        operator="attention", name="flash4", function=attention, devices=("cuda",),
        supports=_supports, rank=35, needs="flash_attn", deterministic=False,
    ),
    Implementation(
        operator="attention_with_lse", name="flash4", function=attention_with_lse,
        devices=("cuda",), supports=_supports, rank=35, needs="flash_attn", deterministic=False,
    ),
)  # fmt: skip
