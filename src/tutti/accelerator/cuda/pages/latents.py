"""Attention to latents in pages, in Triton: each latent is read once, as key and as value."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tutti.accelerator.cuda.common import DTYPES, power_of_two
from tutti.accelerator.cuda.pages.attention import Splits
from tutti.accelerator.cuda.pages.kernels import (
    LOG2E,
    _blank,
    _is_left_out,
    _keys_seen,
    _place,
    _split_of,
    _weighed,
    _write,
)
from tutti.accelerator.paged_segments import PagedSegments
from tutti.accelerator.registry import Implementation

WIDEST_RANK = 512
_QUERIES = 4  # of a tile of a longer row
_KEYS = 32


@triton.jit(do_not_specialize=["table_row", "num_rows", "num_tokens"])
def attend_latents(
    q, pages, out, parts, sums, counters, starts, lengths, first_long, tables, q_row, q_head,
    page_step, place_step, table_row, num_rows, num_tokens, scale,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr, RANK: tl.constexpr,
    WIDE_RANK: tl.constexpr, ROPE: tl.constexpr, WIDE_ROPE: tl.constexpr, N: tl.constexpr,
    SIZE: tl.constexpr, LEAST: tl.constexpr, SPLITS: tl.constexpr, SINGLE: tl.constexpr,
    ZERO: tl.constexpr, PRECISION: tl.constexpr, SORTED: tl.constexpr,
):  # fmt: skip
    """Write what a block of heads makes of latents (T, H, RANK), which are keys and values."""
    tile, block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    M: tl.constexpr = QUERIES * BLOCK
    m, column = tl.arange(0, M), tl.arange(0, N)
    r, p = tl.arange(0, WIDE_RANK), tl.arange(0, WIDE_ROPE)
    head_m = block * BLOCK + m % BLOCK
    row, at, begin, queries = _place(tile, starts, num_rows, first_long, QUERIES, SINGLE,
                                      SORTED)  # fmt: skip
    if ZERO:
        _blank(out, starts, row, queries, split, head_m, head_m < HEADS, num_rows, num_tokens,
               HEADS, BLOCK, M, RANK, WIDE_RANK)  # fmt: skip
    if _is_left_out(queries, at, SINGLE):
        return
    query_m = at + m // BLOCK
    inside = (query_m < queries) & (head_m < HEADS)
    length = tl.load(lengths + row)
    own = length - queries + query_m
    low, high = _keys_seen(length, queries, at, 0, QUERIES, 0)
    used = 1
    if SPLITS > 1:
        low, high, used = _split_of(low, high, split, LEAST, SPLITS)
        if split >= used:
            return
    token_m = (begin + query_m).to(tl.int64)
    lines = q + token_m[:, None] * q_row + head_m[:, None] * q_head
    q_mr = tl.load(lines + r[None, :], mask=inside[:, None] & (r < RANK)[None, :], other=0.0)
    q_mp = tl.load(lines + RANK + p[None, :], mask=inside[:, None] & (p < ROPE)[None, :], other=0.0)
    most = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    collected = tl.zeros((M, WIDE_RANK), tl.float32)
    table = tables + row.to(tl.int64) * table_row
    for start in range(low, high, N):
        other = start + column
        known = other < high
        page = tl.load(table + other // SIZE, mask=known, other=0).to(tl.int64)
        line = pages + (page * page_step + (other % SIZE) * place_step)[:, None]
        c_nr = tl.load(line + r[None, :], mask=known[:, None] & (r < RANK)[None, :], other=0.0)
        c_np = tl.load(
            line + RANK + p[None, :], mask=known[:, None] & (p < ROPE)[None, :], other=0.0
        )
        c_nr, c_np = c_nr.to(q_mr.dtype), c_np.to(q_mr.dtype)
        s = tl.dot(q_mr, tl.trans(c_nr), input_precision=PRECISION)
        s = tl.dot(q_mp, tl.trans(c_np), s, input_precision=PRECISION) * (scale * LOG2E)
        s = tl.where(known[None, :] & (other[None, :] <= own[:, None]), s, float("-inf"))
        w, shrink, most, total = _weighed(s, most, total)
        collected = collected * shrink[:, None]
        collected = tl.dot(w.to(c_nr.dtype), c_nr, collected, input_precision=PRECISION)
    counters += tile * tl.num_programs(1) + block
    kept = row + query_m if SINGLE else token_m
    _write(out, parts, sums, counters, None, collected, most, total, token_m * HEADS + head_m,
           kept * HEADS + head_m, head_m, split, used, inside, RANK, WIDE_RANK, SPLITS,
           False)  # fmt: skip


def latent_attention(
    q: Tensor, pages: Tensor, steps: PagedSegments, *, rank: int, scale: float
) -> Tensor:
    """Return (T, H, rank), as the reference does."""
    rows, (tokens, heads, _) = steps.key_lengths.shape[0], q.shape
    only_single = steps.most_queries <= 1
    alone = only_single and rows >= tokens
    out = q.new_empty(tokens, heads, rank) if alone else q.new_zeros(tokens, heads, rank)
    if not out.numel():
        return out
    block = min(64, max(16, power_of_two(heads)))
    blocks = -(-heads // block)
    splits = Splits.of(out, rows, rows, blocks, steps.most_keys, _KEYS)
    given = (q, pages, steps, rank, scale)
    _launch((rows, blocks, splits.most), block, 1, out, splits, *given, single=True, zero=alone)
    if not only_single:
        block = 16
        tiles = steps.num_queries // _QUERIES + steps.num_long
        grid = (tiles, -(-heads // block), 1)
        _launch(grid, block, _QUERIES, out, Splits.none(out), *given, single=False, zero=False)
    return out


def _launch(
    grid: tuple[int, int, int],
    block: int,
    queries: int,
    out: Tensor,
    splits: Splits,
    q: Tensor,
    pages: Tensor,
    steps: PagedSegments,
    rank: int,
    scale: float,
    *,
    single: bool,
    zero: bool,
) -> None:
    rope = q.shape[2] - rank
    wide = q.dtype == torch.float32
    attend_latents[grid](
        q, pages, out, splits.parts, splits.sums, splits.counters, steps.query_starts,
        steps.key_lengths, steps.first_long, steps.tables, q.stride(0), q.stride(1),
        pages.stride(0), pages.stride(1), steps.tables.stride(0), steps.key_lengths.shape[0],
        q.shape[0], scale,
        HEADS=q.shape[1], BLOCK=block, QUERIES=queries, RANK=rank,
        WIDE_RANK=max(16, power_of_two(rank)), ROPE=rope, WIDE_ROPE=max(16, power_of_two(rope)),
        N=16 if wide else _KEYS, SIZE=steps.page_size, LEAST=splits.least, SPLITS=splits.most,
        SINGLE=single, ZERO=zero, SORTED=steps.first_long is not None,
        PRECISION="ieee" if wide else "tf32",
        num_warps=8 if block * queries >= 64 else 4, num_stages=1 if wide else 3,
    )  # fmt: skip


def _reason(
    q: Tensor, pages: Tensor, _steps: PagedSegments, *, rank: int, scale: float
) -> str | None:
    """Say why the kernel cannot take a call, or None."""
    del scale
    if q.dtype not in DTYPES:
        return f"no {str(q.dtype).removeprefix('torch.')}"
    if rank > WIDEST_RANK:
        return f"a latent wider than {WIDEST_RANK}"
    if q.shape[-1] == rank:
        return "a latent without rotary part"
    if q.stride(-1) != 1 or pages.stride(-1) != 1:
        return "elements of a latent that do not follow each other"
    return None


IMPLEMENTATIONS = (
    Implementation(
        operator="latent_attention",
        name="triton",
        function=latent_attention,
        devices=("cuda",),
        supports=_reason,
        rank=20,
        exact=False,
        needs="triton",
    ),
)
