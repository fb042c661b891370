"""Keys and values in pages: how they are stored, and attention to them, through plain attention.

Pages are (pages, places, G, D); a place is a page times its size plus the place in it. Attention
gathers each row's keys and says what `attention` says of them: that is the meaning of every option.
`slopes` (H,) are ALiBi's: a key at position p gets slope · p, `rounded` to bfloat16 where a model
was trained so, times `slopes_factor`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tutti.accelerator.paged_segments import PagedSegments
from tutti.accelerator.reference.attention import WindowKind, attention
from tutti.accelerator.reference.norm import rms_norm
from tutti.accelerator.reference.pointwise import rotary


def store_pages(
    k: Tensor, v: Tensor, key_pages: Tensor, value_pages: Tensor, places: Tensor
) -> None:
    """Write keys (T, G, D) and values (T, G, E) to their places."""
    for new, pages in ((k, key_pages), (v, value_pages)):
        pages.view(-1, *pages.shape[2:])[places] = new.to(pages.dtype)


def store_latents(latents: Tensor, pages: Tensor, places: Tensor) -> None:
    """Write latents (T, R) to their places in pages (pages, places, R)."""
    pages.view(-1, pages.shape[2])[places] = latents.to(pages.dtype)


def store_heads(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    places: Tensor,
    *,
    heads: int,
    kv_heads: int,
    interleaved: bool = False,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
    unit_offset: bool = False,
) -> Tensor:
    """Return the queries of x (T, heads + 2·kv_heads, D), rotated; write keys and values.

    With weights of norms (D,), each query and key is normed before by itself.
    """
    q, k, v = x.split([heads, kv_heads, kv_heads], dim=1)
    if query_norm is not None:
        q = rms_norm(q, query_norm, eps=eps, unit_offset=unit_offset)
    if key_norm is not None:
        k = rms_norm(k, key_norm, eps=eps, unit_offset=unit_offset)
    k = rotary(k, cos, sin, interleaved=interleaved)
    store_pages(k, v, key_pages, value_pages, places)
    return rotary(q, cos, sin, interleaved=interleaved)


def linear_bias(slopes_h: Tensor, positions_s: Tensor, *, rounded: bool, factor: float) -> Tensor:
    """Return (H, S): what ALiBi adds to the scaled scores of keys at positions."""
    if rounded:
        bias_hs = (slopes_h.bfloat16().unsqueeze(1) * positions_s).float()
    else:
        bias_hs = slopes_h.unsqueeze(1) * positions_s
    return bias_hs * factor if factor != 1.0 else bias_hs


def paged_attention(
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    steps: PagedSegments,
    *,
    scale: float,
    window: int | None = None,
    window_kind: WindowKind = "sliding",
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    slopes_rounded: bool = False,
    slopes_factor: float = 1.0,
) -> Tensor:
    """Return (T, H, E): attention of new tokens to all keys of their sequences; padding gets 0."""
    segments, tables = steps.on_host()
    out = q.new_zeros(q.shape[0], q.shape[1], value_pages.shape[-1])
    if not len(segments):
        return out
    gathered = [
        torch.cat([gather_pages(pages, *row) for row in zip(tables, segments.keys, strict=True)])
        for pages in (key_pages, value_pages)
    ]
    k, v = (tensor.to(q.dtype) for tensor in gathered)
    bias = None
    if slopes is not None:
        runs = [torch.arange(keys, device=q.device) for keys in segments.keys]
        bias = linear_bias(slopes, torch.cat(runs), rounded=slopes_rounded, factor=slopes_factor)
    out[: segments.num_queries] = attention(
        q[: segments.num_queries], k, v, segments, scale=scale, window=window,
        window_kind=window_kind, soft_cap=soft_cap, sinks=sinks, key_bias=bias,
    )  # fmt: skip
    return out


def gather_pages(pages: Tensor, row: Tensor, keys: int) -> Tensor:
    """Return the first keys of the pages that a row of the table names, one after the other."""
    used = -(-keys // pages.shape[1])
    return pages[row[:used].long()].flatten(0, 1)[:keys]


def latent_attention(
    q: Tensor, pages: Tensor, steps: PagedSegments, *, rank: int, scale: float
) -> Tensor:
    """Return (T, H, rank): q (T, H, R) attend to latents; their first `rank` are the values."""
    keys = pages.unsqueeze(2)
    return paged_attention(q, keys, keys[..., :rank], steps, scale=scale)
