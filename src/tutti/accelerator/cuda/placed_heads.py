"""Queries, keys and values of one product on their way to attention: norms and rotary in one pass.

What comes out is one tensor of its own, values included, so that the product's output is kept only
where a norm's backward pass needs it. Backward writes the three gradients into one tensor, as the
product's backward pass takes it; the gradients of the norms' weights are summed by each program
over its tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tutti.accelerator.cuda.common import num_programs, power_of_two, reason_against
from tutti.accelerator.registry import Implementation

_HEADS = 8  # of a program
_PROGRAMS = 16  # per processor, of a backward pass


@triton.jit
def _columns(pair, half, INTERLEAVED: tl.constexpr):
    """Return where the two numbers of each pair stand in their head."""
    if INTERLEAVED:
        return 2 * pair, 2 * pair + 1
    return pair, pair + half


@triton.jit
def normed_part(x, rms, weight, column, known, OFFSET: tl.constexpr, dtype: tl.constexpr):
    """Return x as a norm leaves it, rounded as the composition rounds it."""
    w = tl.load(weight + column, mask=known, other=0.0).to(tl.float32)
    if OFFSET:
        return (x * rms * (1.0 + w)).to(dtype).to(tl.float32)
    return ((x * rms).to(dtype).to(tl.float32) * w).to(dtype).to(tl.float32)


@triton.jit
def _place(
    x, cos, sin, y, query_norm, key_norm, x_token, x_head, table_row, half, width, eps,
    QUERIES: tl.constexpr, GROUPS: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr, NORMED: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    all_heads: tl.constexpr = QUERIES + 2 * GROUPS
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, HALF)[None, :]
    inside = (head < all_heads) & (pair < half)
    first_column, second_column = _columns(pair, half, INTERLEAVED)
    source = x + token * x_token + head * x_head
    target = y + (token * all_heads + head) * width
    first = tl.load(source + first_column, mask=inside, other=0.0)
    second = tl.load(source + second_column, mask=inside, other=0.0)
    dtype: tl.constexpr = first.dtype
    first, second = first.to(tl.float32), second.to(tl.float32)
    is_query, is_value = head < QUERIES, head >= QUERIES + GROUPS
    if NORMED:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        rms = (1.0 / tl.sqrt(squares / width + eps))[:, None]
        weight = tl.where(is_query, query_norm, key_norm)
        known = inside & (is_value == 0)
        one = normed_part(first, rms, weight, first_column, known, OFFSET, dtype)
        other = normed_part(second, rms, weight, second_column, known, OFFSET, dtype)
        first, second = tl.where(is_value, first, one), tl.where(is_value, second, other)
    c = tl.load(cos + token * table_row + pair, mask=pair < half, other=0.0).to(tl.float32)
    s = tl.load(sin + token * table_row + pair, mask=pair < half, other=0.0).to(tl.float32)
    c, s = tl.where(is_value, 1.0, c), tl.where(is_value, 0.0, s)
    tl.store(target + first_column, first * c - second * s, mask=inside)
    tl.store(target + second_column, second * c + first * s, mask=inside)
    if REST > 0:
        column = 2 * half + tl.arange(0, REST)[None, :]
        kept = (head < all_heads) & (column < width)
        tl.store(target + column, tl.load(source + column, mask=kept), mask=kept)


@triton.jit
def _norm_back(first, second, was0, was1, weight, first_column, second_column, known, width, eps,
               OFFSET: tl.constexpr):  # fmt: skip
    """Return the gradients of what a norm was given, and what it made before its weight."""
    squares = tl.sum(was0 * was0, 1) + tl.sum(was1 * was1, 1)
    rms = (1.0 / tl.sqrt(squares / width + eps))[:, None]
    was0, was1 = was0 * rms, was1 * rms
    w0 = tl.load(weight + first_column, mask=known, other=0.0).to(tl.float32)
    w1 = tl.load(weight + second_column, mask=known, other=0.0).to(tl.float32)
    if OFFSET:
        w0, w1 = w0 + 1.0, w1 + 1.0
    down0, down1 = first * w0, second * w1
    mean = ((tl.sum(down0 * was0, 1) + tl.sum(down1 * was1, 1)) / width)[:, None]
    return (down0 - was0 * mean) * rms, (down1 - was1 * mean) * rms, was0, was1


@triton.jit
def _collected(gradient, normed, chosen):
    """Return what the chosen heads add to the gradient of a norm's weight."""
    return tl.sum(tl.where(chosen, gradient * normed, 0.0), 0)


@triton.jit
def _place_back(
    q, k, v, x, cos, sin, y, query_norm, key_norm, partial, q_token, q_head, k_token, k_head,
    v_token, v_head, x_token, x_head, table_row, tokens, half, width, eps,
    QUERIES: tl.constexpr, GROUPS: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr, NORMED: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    all_heads: tl.constexpr = QUERIES + 2 * GROUPS
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, HALF)[None, :]
    inside = (head < all_heads) & (pair < half)
    first_column, second_column = _columns(pair, half, INTERLEAVED)
    is_query, is_value = head < QUERIES, head >= QUERIES + GROUPS
    is_key = (is_query == 0) & (is_value == 0)
    of_q0, of_q1 = tl.zeros((HALF,), tl.float32), tl.zeros((HALF,), tl.float32)
    of_k0, of_k1 = tl.zeros((HALF,), tl.float32), tl.zeros((HALF,), tl.float32)
    token, step = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    for _ in range(tl.program_id(0), tokens, step):
        source = tl.where(
            is_query, q + token * q_token + head * q_head,
            tl.where(is_value, v + token * v_token + (head - QUERIES - GROUPS) * v_head,
                     k + token * k_token + (head - QUERIES) * k_head),
        )  # fmt: skip
        turned0 = tl.load(source + first_column, mask=inside, other=0.0).to(tl.float32)
        turned1 = tl.load(source + second_column, mask=inside, other=0.0).to(tl.float32)
        c = tl.load(cos + token * table_row + pair, mask=pair < half, other=0.0).to(tl.float32)
        s = tl.load(sin + token * table_row + pair, mask=pair < half, other=0.0).to(tl.float32)
        c, s = tl.where(is_value, 1.0, c), tl.where(is_value, 0.0, s)
        first, second = turned0 * c + turned1 * s, turned1 * c - turned0 * s
        target = y + (token * all_heads + head) * width
        if NORMED:
            base = x + token * x_token + head * x_head
            was0 = tl.load(base + first_column, mask=inside, other=0.0).to(tl.float32)
            was1 = tl.load(base + second_column, mask=inside, other=0.0).to(tl.float32)
            down0, down1, was0, was1 = _norm_back(
                first, second, was0, was1, tl.where(is_query, query_norm, key_norm), first_column,
                second_column, inside & (is_value == 0), width, eps, OFFSET,
            )  # fmt: skip
            of_q0 += _collected(first, was0, is_query)
            of_q1 += _collected(second, was1, is_query)
            of_k0 += _collected(first, was0, is_key)
            of_k1 += _collected(second, was1, is_key)
            first, second = tl.where(is_value, first, down0), tl.where(is_value, second, down1)
        tl.store(target + first_column, first, mask=inside)
        tl.store(target + second_column, second, mask=inside)
        if REST > 0:
            column = 2 * half + tl.arange(0, REST)[None, :]
            kept = (head < all_heads) & (column < width)
            tl.store(target + column, tl.load(source + column, mask=kept), mask=kept)
        token += step
    if NORMED:
        own = partial + (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * 2 * width
        pairs = tl.arange(0, HALF)
        one, other = _columns(pairs, half, INTERLEAVED)
        tl.store(own + one, of_q0, mask=pairs < half)
        tl.store(own + other, of_q1, mask=pairs < half)
        tl.store(own + width + one, of_k0, mask=pairs < half)
        tl.store(own + width + other, of_k1, mask=pairs < half)


class _PlacedHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        query_norm: Tensor | None,
        key_norm: Tensor | None,
        heads: int,
        kv_heads: int,
        interleaved: bool,
        eps: float,
        unit_offset: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        normed = query_norm is not None
        ctx.save_for_backward(x if normed else None, cos, sin, query_norm, key_norm)
        ctx.options = (heads, kv_heads, interleaved, eps, unit_offset)
        tokens, all_heads, width = x.shape
        half, block = cos.shape[-1], min(_HEADS, power_of_two(all_heads))
        rest = width - 2 * half
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _place[(tokens, triton.cdiv(all_heads, block))](
            x, cos, sin, y, query_norm, key_norm, x.stride(0), x.stride(1), cos.stride(0), half,
            width, eps, QUERIES=heads, GROUPS=kv_heads, INTERLEAVED=interleaved, HEADS=block,
            HALF=power_of_two(half), REST=power_of_two(rest) if rest else 0, NORMED=normed,
            OFFSET=unit_offset, num_warps=4,
        )  # fmt: skip
        q, k, v = y.split([heads, kv_heads, kv_heads], dim=1)
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        x, cos, sin, query_norm, key_norm = ctx.saved_tensors
        heads, kv_heads, interleaved, eps, unit_offset = ctx.options
        q, k, v = (each if each.stride(-1) == 1 else each.contiguous() for each in gradients)
        tokens, _, width = q.shape
        all_heads, half = heads + 2 * kv_heads, cos.shape[-1]
        block, rest = min(_HEADS, power_of_two(all_heads)), width - 2 * half
        blocks, normed = triton.cdiv(all_heads, block), x is not None
        programs = tokens if not normed else min(tokens, num_programs(q, _PROGRAMS))
        y = torch.empty((tokens, all_heads, width), dtype=q.dtype, device=q.device)
        partial = None
        if normed:
            sums = (programs, blocks, 2, width)
            partial = torch.empty(sums, dtype=torch.float32, device=q.device)
        before = y if x is None else x
        _place_back[(programs, blocks)](
            q, k, v, before, cos, sin, y, query_norm, key_norm, partial, q.stride(0), q.stride(1),
            k.stride(0), k.stride(1), v.stride(0), v.stride(1), before.stride(0), before.stride(1),
            cos.stride(0), tokens, half, width, eps, QUERIES=heads, GROUPS=kv_heads,
            INTERLEAVED=interleaved, HEADS=block, HALF=power_of_two(half),
            REST=power_of_two(rest) if rest else 0, NORMED=normed, OFFSET=unit_offset, num_warps=4,
        )  # fmt: skip
        norms: tuple[Tensor | None, Tensor | None] = (None, None)
        if partial is not None:
            of_query, of_key = partial.sum((0, 1)).to(query_norm.dtype)
            norms = (of_query, of_key)
        return (y, None, None, *norms, None, None, None, None, None)


def split_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    heads: int,
    kv_heads: int,
    interleaved: bool = False,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
    unit_offset: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and keys, normed and rotated, and values."""
    placed: tuple[Tensor, Tensor, Tensor] = _PlacedHeads.apply(
        x, cos, sin, query_norm, key_norm, heads, kv_heads, interleaved, eps, unit_offset
    )
    return placed


def supports_heads(x: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> str | None:
    """Say why the kernels cannot take these heads, or None."""
    if x.dim() != 3:
        return "heads of another shape than (T, H, D)"
    if cos.stride() != sin.stride():
        return "cosines and sines of different layout"
    norms = [options.get(name) for name in ("query_norm", "key_norm")]
    if (norms[0] is None) != (norms[1] is None):
        return "a norm on queries or keys alone"
    if norms[0] is not None and 2 * cos.shape[-1] != x.shape[-1]:
        return "norms on heads of which a part is rotated"
    return reason_against(x, cos, sin, *norms)


IMPLEMENTATIONS = (
    Implementation(
        operator="split_rotary", name="triton", function=split_rotary, devices=("cuda",),
        supports=supports_heads, rank=20, needs="triton",
    ),
)  # fmt: skip
