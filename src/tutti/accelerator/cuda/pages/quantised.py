"""What writes keys and values to pages of 8 bits: a program per token, heads beside each other."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from tutti.accelerator.cuda.common import power_of_two, reason_against
from tutti.accelerator.cuda.early_launch import early, wait
from tutti.accelerator.cuda.pages.attention import CODES
from tutti.accelerator.reference.quantised_pages import largest_code
from tutti.accelerator.registry import Implementation

_HEADS = 8  # of a program
ROUNDS = tl.constexpr(12582912.0)  # 1.5 · 2²³: what is added to it loses its fraction, as rounded


@triton.jit
def _code(x, pages, scales, token, place, head, known, x_token, x_head, width, most, groups,
          WHOLE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Write some heads of a token as codes, each with its scale: the reference's arithmetic."""
    column = tl.arange(0, BLOCK)[None, :]
    inside = known[:, None] & (column < width)
    source = x + token * x_token + head[:, None] * x_head + column
    values = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.max(tl.abs(values), 1), most)
    codes = tl.div_rn(values, tl.where(scale > 0, scale, 1.0)[:, None])
    if WHOLE:
        codes = (codes + ROUNDS) - ROUNDS
    codes = tl.minimum(tl.maximum(codes, -most), most)
    line = place * groups + head
    tl.store(pages + line[:, None] * width + column, codes.to(pages.dtype.element_ty), mask=inside)
    tl.store(scales + line, scale, mask=known)


@triton.jit
def _store(
    k, v, keys, values, key_scales, value_scales, places, k_token, k_head, v_token, v_head,
    k_width, v_width, k_most, v_most, groups,
    K_WHOLE: tl.constexpr, V_WHOLE: tl.constexpr, K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr,
    HEADS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(places + token).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    known = head < groups
    _code(k, keys, key_scales, token, place, head, known, k_token, k_head, k_width, k_most, groups,
          K_WHOLE, K_BLOCK)  # fmt: skip
    _code(v, values, value_scales, token, place, head, known, v_token, v_head, v_width, v_most,
          groups, V_WHOLE, V_BLOCK)  # fmt: skip


def store_quantised_pages(
    k: Tensor,
    v: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    key_scales: Tensor,
    value_scales: Tensor,
    places: Tensor,
) -> None:
    """Write keys and values to their places as codes, with their scales."""
    tokens, groups, width = k.shape
    heads = min(_HEADS, power_of_two(groups))
    _store[(tokens, triton.cdiv(groups, heads))](
        k, v, key_pages, value_pages, key_scales, value_scales, places, k.stride(0), k.stride(1),
        v.stride(0), v.stride(1), width, v.shape[2], float(largest_code(key_pages.dtype)),
        float(largest_code(value_pages.dtype)), groups,
        K_WHOLE=not key_pages.dtype.is_floating_point,
        V_WHOLE=not value_pages.dtype.is_floating_point, K_BLOCK=power_of_two(width),
        V_BLOCK=power_of_two(v.shape[2]), HEADS=heads, num_warps=4, **early(k),
    )  # fmt: skip


def _reason(
    k: Tensor,
    v: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    key_scales: Tensor,
    value_scales: Tensor,
    *_others: Any,
) -> str | None:
    """Say why the kernel cannot take a call, or None."""
    if key_pages.dtype not in CODES or value_pages.dtype not in CODES:
        return "codes of int8 or float8_e4m3fn only"
    pages = (key_pages, value_pages, key_scales, value_scales)
    if not all(tensor.is_contiguous() for tensor in pages):
        return "pages that are part of something"
    return reason_against(k, v)


IMPLEMENTATIONS = (
    Implementation(
        operator="store_quantised_pages", name="triton", function=store_quantised_pages,
        devices=("cuda",), supports=_reason, rank=20, exact=False, needs="triton",
    ),
)  # fmt: skip
