"""Attention with scores written out: the meaning of every mask, cap, bias and sink.

Shapes: q (T, H, D), k (S, G, D), v (S, G, E) with G key-value heads, H a multiple of G; `key_bias`
(H, S) is added to the scores of a key (ALiBi). Softmax in float32 at least.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from tutti.accelerator.products import product
from tutti.accelerator.segments import Segments

WindowKind = Literal["sliding", "chunked"]


def first_key(query: int, window: int | None, kind: WindowKind) -> int:
    """Return the first key that a query sees."""
    if window is None:
        return 0
    return max(0, query - window + 1) if kind == "sliding" else query // window * window


def visible(
    queries: int,
    keys: int,
    *,
    causal: bool,
    window: int | None,
    window_kind: WindowKind,
    device: torch.device,
) -> Tensor:
    """Return which keys each query sees (queries × keys); the last query sits on the last key."""
    own = torch.arange(keys - queries, keys, device=device).unsqueeze(1)
    other = torch.arange(keys, device=device).unsqueeze(0)
    seen = other <= own if causal else torch.ones(queries, keys, dtype=torch.bool, device=device)
    if window is not None:
        near = (
            own - other < window if window_kind == "sliding" else own // window == other // window
        )
        seen = seen & near
    return seen


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    window_kind: WindowKind = "sliding",
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    key_bias: Tensor | None = None,
) -> Tensor:
    """Return (T, H, E): each query's mean of the values it sees, weighted by its scores."""
    return torch.cat(
        [
            part
            for part, _ in _segments_of(
                q,
                k,
                v,
                segments,
                scale=scale,
                causal=causal,
                window=window,
                window_kind=window_kind,
                soft_cap=soft_cap,
                sinks=sinks,
                key_bias=key_bias,
            )
        ]
    )


def attention_with_lse(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, *, scale: float, causal: bool = True
) -> tuple[Tensor, Tensor]:
    """Return attention and the log of its sum of exponentials (T, H), to merge partial results."""
    parts = _segments_of(
        q, k, v, segments, scale=scale, causal=causal, window=None, window_kind="sliding",
        soft_cap=None, sinks=None, key_bias=None,
    )  # fmt: skip
    return torch.cat([part for part, _ in parts]), torch.cat([lse for _, lse in parts])


def _segments_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments,
    *,
    scale: float,
    causal: bool,
    window: int | None,
    window_kind: WindowKind,
    soft_cap: float | None,
    sinks: Tensor | None,
    key_bias: Tensor | None,
) -> list[tuple[Tensor, Tensor]]:
    group = q.shape[1] // k.shape[1]
    parts = []
    for start, queries, first, keys in zip(
        segments.query_starts, segments.queries, segments.key_starts, segments.keys, strict=True
    ):
        own = slice(first, first + keys)
        q_htd = q[start : start + queries].transpose(0, 1)
        k_hsd = k[own].transpose(0, 1).repeat_interleave(group, dim=0)
        v_hse = v[own].transpose(0, 1).repeat_interleave(group, dim=0)
        scores_hts = product(q_htd, k_hsd.transpose(1, 2)) * scale
        if soft_cap is not None:
            scores_hts = soft_cap * torch.tanh(scores_hts / soft_cap)
        if key_bias is not None:
            scores_hts = scores_hts + key_bias[:, None, own].to(scores_hts.dtype)
        seen = visible(
            queries, keys, causal=causal, window=window, window_kind=window_kind, device=q.device
        )
        scores_hts = scores_hts.masked_fill(~seen, float("-inf"))
        parts.append(_weighted(scores_hts, v_hse, sinks))
    return parts


def _weighted(scores_hts: Tensor, v_hse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    keys = scores_hts.shape[-1]
    if sinks is not None:
        column = sinks.to(scores_hts.dtype)[:, None, None].expand(-1, scores_hts.shape[1], 1)
        scores_hts = torch.cat((scores_hts, column), dim=-1)
    wide = scores_hts if scores_hts.dtype == torch.float64 else scores_hts.float()
    weights_hts = functional.softmax(wide, dim=-1)[..., :keys].to(v_hse.dtype)
    lse_th = torch.logsumexp(wide, dim=-1).transpose(0, 1)
    return product(weights_hts, v_hse).transpose(0, 1), lse_th
