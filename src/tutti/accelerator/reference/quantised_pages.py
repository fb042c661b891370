"""Keys and values in pages of 8 bits: integers or floats, and one scale per token and head.

Pages are (pages, places, G, D) in int8 or float8_e4m3fn, scales (pages, places, G) in float32; a
number is its code times its scale. Codes are made in float32, whatever the numbers came in, so that
every device stores the same ones. Attention is that to what the codes stand for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tutti.accelerator.paged_segments import PagedSegments
from tutti.accelerator.reference.paged import paged_attention


def largest_code(dtype: torch.dtype) -> float:
    """Return the code that the largest number of a head gets."""
    return torch.finfo(dtype).max if dtype.is_floating_point else 127.0


def as_codes(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return codes of x (…, D), and the scale of each last dimension."""
    most = largest_code(dtype)
    wide = x.float()
    scales = wide.abs().amax(-1) / most
    codes = wide / torch.where(scales > 0, scales, 1.0).unsqueeze(-1)
    if not dtype.is_floating_point:
        codes = codes.round()
    return codes.clamp(-most, most).to(dtype), scales


def widened(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what codes stand for."""
    wide = torch.promote_types(dtype, torch.float32)
    return (codes.to(wide) * scales.to(wide).unsqueeze(-1)).to(dtype)


def store_quantised_pages(
    k: Tensor,
    v: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    key_scales: Tensor,
    value_scales: Tensor,
    places: Tensor,
) -> None:
    """Write keys (T, G, D) and values (T, G, E) to their places as codes, with their scales."""
    for new, pages, scales in ((k, key_pages, key_scales), (v, value_pages, value_scales)):
        codes, own = as_codes(new, pages.dtype)
        pages.view(-1, *pages.shape[2:])[places] = codes
        scales.view(-1, scales.shape[2])[places] = own.to(scales.dtype)


def quantised_paged_attention(
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    key_scales: Tensor,
    value_scales: Tensor,
    steps: PagedSegments,
    **options: Any,
) -> Tensor:
    """Return (T, H, E), as `paged_attention` does of pages that hold what the codes stand for."""
    keys = widened(key_pages, key_scales, q.dtype)
    values = widened(value_pages, value_scales, q.dtype)
    return paged_attention(q, keys, values, steps, **options)
