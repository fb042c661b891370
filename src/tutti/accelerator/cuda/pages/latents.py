"""Attention to latents in pages, in Triton: each latent is read once, as key and as value."""

from __future__ import annotations

import torch
from torch import Tensor

from tutti.accelerator.cuda.common import DTYPES, power_of_two
from tutti.accelerator.cuda.pages import kernels
from tutti.accelerator.cuda.pages.attention import Splits
from tutti.accelerator.paged_segments import PagedSegments
from tutti.accelerator.registry import Implementation

WIDEST_RANK = 512
_QUERIES = 4  # of a tile of a longer row
_KEYS = 32


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
    kernels.attend_latents[grid](
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
