"""Attention through torch's scaled_dot_product_attention, which every back end has a kernel for.

Whole sequences of one length go through as one rectangle; other segments one after the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tutti.accelerator.products import widens
from tutti.accelerator.reference.attention import visible
from tutti.accelerator.registry import Implementation, register
from tutti.accelerator.segments import Segments

MOST_SEGMENTS = 64  # more are many small kernels


def supports(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments,
    *,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    key_bias: Tensor | None = None,
    **_options: Any,
) -> str | None:
    """Say why a call cannot go through it."""
    del q, k, v
    if soft_cap is not None:
        return "no soft cap"
    if sinks is not None:
        return "no sinks"
    if key_bias is not None:
        return "no key bias"
    if len(segments) > MOST_SEGMENTS and not segments.is_batch:
        return f"at most {MOST_SEGMENTS} segments"
    return None


def aligned(tensor: Tensor) -> Tensor:
    """Return the tensor with rows that kernels can read 16 bytes at a time, copied if need be.

    Fused kernels do not check: on others they give wrong numbers or stop the device.
    """
    unit = 16 // tensor.element_size()
    steps = (tensor.storage_offset(), *tensor.stride()[:-1])
    if tensor.stride(-1) == 1 and not any(step % unit for step in steps):
        return tensor
    return tensor.contiguous()


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    window_kind: str = "sliding",
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    key_bias: Tensor | None = None,
) -> Tensor:
    """Return (T, H, E), as the reference does."""
    del soft_cap, sinks, key_bias
    dtype = q.dtype
    if widens(q):
        q, k, v = q.float(), k.float(), v.float()
    q, k, v = aligned(q), aligned(k), aligned(v)
    options = {"scale": scale, "causal": causal, "window": window, "window_kind": window_kind}
    if segments.is_batch:
        length = segments.queries[0]
        parts = [tensor.unflatten(0, (-1, length)) for tensor in (q, k, v)]
        return _rectangle(*parts, **options).flatten(0, 1).to(dtype)  # type: ignore[arg-type]
    outputs = []
    for start, queries, first, keys in zip(
        segments.query_starts, segments.queries, segments.key_starts, segments.keys, strict=True
    ):
        own = slice(first, first + keys)
        parts = [q[start : start + queries], k[own], v[own]]
        one = _rectangle(*(part.unsqueeze(0) for part in parts), **options)  # type: ignore[arg-type]
        outputs.append(one.squeeze(0))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).to(dtype)


def _rectangle(
    q_blhd: Tensor,
    k_blgd: Tensor,
    v_blge: Tensor,
    *,
    scale: float,
    causal: bool,
    window: int | None,
    window_kind: Any,
) -> Tensor:
    queries, keys = q_blhd.shape[1], k_blgd.shape[1]
    near = window is not None and window < keys
    mask = None
    if near or (causal and 1 < queries < keys):
        mask = visible(
            queries,
            keys,
            causal=causal,
            window=window,
            window_kind=window_kind,
            device=q_blhd.device,
        )
    y_bhle = functional.scaled_dot_product_attention(
        q_blhd.transpose(1, 2),
        k_blgd.transpose(1, 2),
        v_blge.transpose(1, 2),
        attn_mask=mask,
        is_causal=causal and mask is None and queries > 1,
        scale=scale,
        enable_gqa=q_blhd.shape[2] != k_blgd.shape[2],
    )
    return y_bhle.transpose(1, 2)


register(
    Implementation(
        operator="attention",
        name="sdpa",
        function=attention,
        supports=supports,
        rank=10,
        deterministic=False,  # some back ends are not
    )
)
