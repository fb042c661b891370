"""Queries, keys and values on their way to attention: norms, rotary and pages in one pass."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from tutti.accelerator.cuda.common import power_of_two, reason_against
from tutti.accelerator.cuda.early_launch import early, wait
from tutti.accelerator.cuda.placed_heads import normed_part
from tutti.accelerator.registry import Implementation

_HEADS = 8  # of a program


@triton.jit
def _store(
    x, cos, sin, y, keys, values, places, query_norm, key_norm, x_token, x_head, k_place, k_head,
    v_place, v_head, table_row, half, width, eps,
    QUERIES: tl.constexpr, GROUPS: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr, NORMED: tl.constexpr, OFFSET: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    token = tl.program_id(0).to(tl.int64)
    all_heads: tl.constexpr = QUERIES + 2 * GROUPS
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, HALF)[None, :]
    inside = (head < all_heads) & (pair < half)
    if INTERLEAVED:
        first_column, second_column = 2 * pair, 2 * pair + 1
    else:
        first_column, second_column = pair, pair + half
    source = x + token * x_token + head * x_head
    first = tl.load(source + first_column, mask=inside, other=0.0)
    second = tl.load(source + second_column, mask=inside, other=0.0)
    dtype: tl.constexpr = first.dtype
    first, second = first.to(tl.float32), second.to(tl.float32)
    is_query, is_value = head < QUERIES, head >= QUERIES + GROUPS
    if REST > 0:
        column = 2 * half + tl.arange(0, REST)[None, :]
        kept = (head < all_heads) & (column < width)
        rest = tl.load(source + column, mask=kept, other=0.0).to(tl.float32)
    if NORMED:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        if REST > 0:
            squares += tl.sum(rest * rest, 1)
        rms = tl.rsqrt(squares / width + eps)[:, None]
        weight = tl.where(is_query, query_norm, key_norm)
        known = inside & (head < QUERIES + GROUPS)
        first = tl.where(
            is_value, first, normed_part(first, rms, weight, first_column, known, OFFSET, dtype)
        )
        second = tl.where(
            is_value, second, normed_part(second, rms, weight, second_column, known, OFFSET, dtype)
        )
        if REST > 0:
            known = kept & (head < QUERIES + GROUPS)
            normed = normed_part(rest, rms, weight, column, known, OFFSET, dtype)
            rest = tl.where(is_value, rest, normed)
    c = tl.load(cos + token * table_row + pair, mask=pair < half, other=0.0)
    s = tl.load(sin + token * table_row + pair, mask=pair < half, other=0.0)
    c = tl.where(is_value, 1.0, c.to(dtype).to(tl.float32))
    s = tl.where(is_value, 0.0, s.to(dtype).to(tl.float32))
    turned, other = first * c - second * s, second * c + first * s
    place = tl.load(places + token).to(tl.int64)
    query = y + (token * QUERIES + head) * width
    key = keys + place * k_place + (head - QUERIES) * k_head
    value = values + place * v_place + (head - QUERIES - GROUPS) * v_head
    is_key = (head >= QUERIES) & (head < QUERIES + GROUPS)
    tl.store(query + first_column, turned, mask=inside & is_query)
    tl.store(query + second_column, other, mask=inside & is_query)
    tl.store(key + first_column, turned, mask=inside & is_key)
    tl.store(key + second_column, other, mask=inside & is_key)
    tl.store(value + first_column, turned, mask=inside & is_value)
    tl.store(value + second_column, other, mask=inside & is_value)
    if REST > 0:
        tl.store(query + column, rest, mask=kept & is_query)
        tl.store(key + column, rest, mask=kept & is_key)
        tl.store(value + column, rest, mask=kept & is_value)


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
    """Return the queries, and write keys and values, as the reference does."""
    tokens, all_heads, width = x.shape
    y = x.new_empty(tokens, heads, width)
    if not tokens:
        return y
    half = cos.shape[-1]
    rest = width - 2 * half
    block = min(_HEADS, power_of_two(all_heads))
    _store[(tokens, triton.cdiv(all_heads, block))](
        x, cos, sin, y, key_pages, value_pages, places, query_norm, key_norm, x.stride(0),
        x.stride(1), key_pages.stride(1), key_pages.stride(2), value_pages.stride(1),
        value_pages.stride(2), cos.stride(0), half, width, eps, QUERIES=heads, GROUPS=kv_heads,
        INTERLEAVED=interleaved, HEADS=block, HALF=power_of_two(half),
        REST=power_of_two(rest) if rest else 0, NORMED=query_norm is not None, OFFSET=unit_offset,
        num_warps=4, **early(x),
    )  # fmt: skip
    return y


def _reason(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    _places: Tensor,
    *,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    **_options: Any,
) -> str | None:
    """Say why the kernel cannot take a call, or None."""
    if (query_norm is None) != (key_norm is None):
        return "a norm of queries or keys alone"
    if key_pages.shape[-1] != value_pages.shape[-1]:
        return "values of another width than keys"
    if not (key_pages.is_contiguous() and value_pages.is_contiguous()):
        return "pages that are part of something"
    return reason_against(x if x.numel() else None, cos, sin, query_norm, key_norm)


IMPLEMENTATIONS = (
    Implementation(
        operator="store_heads",
        name="triton",
        function=store_heads,
        devices=("cuda",),
        supports=_reason,
        rank=20,
        exact=False,
        needs="triton",
    ),
)
