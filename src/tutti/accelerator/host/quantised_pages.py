"""Attention to pages of 8 bits on the host: the pages in use are widened, each once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tutti.accelerator import paged
from tutti.accelerator.paged_segments import PagedSegments
from tutti.accelerator.reference.quantised_pages import widened
from tutti.accelerator.registry import Implementation, register


def quantised_paged_attention(
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    key_scales: Tensor,
    value_scales: Tensor,
    steps: PagedSegments,
    **options: Any,
) -> Tensor:
    """Return (T, H, E), as the reference does."""
    used, places = torch.unique(steps.tables.long(), return_inverse=True)
    own = replace(steps, tables=places.to(steps.tables.dtype))
    keys = widened(key_pages[used], key_scales[used], q.dtype)
    values = widened(value_pages[used], value_scales[used], q.dtype)
    return paged.paged_attention(q, keys, values, own, **options)


register(
    Implementation(
        operator="quantised_paged_attention",
        name="host",
        function=quantised_paged_attention,
        devices=("cpu",),
        rank=10,
        exact=False,
        asks_host=True,
    )
)
