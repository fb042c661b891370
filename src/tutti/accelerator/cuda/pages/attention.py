"""Attention to keys in pages, and what writes them, in Triton."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tutti.accelerator.cuda.common import DTYPES, num_programs, power_of_two, zero_counters
from tutti.accelerator.cuda.early import early
from tutti.accelerator.cuda.pages import kernels
from tutti.accelerator.cuda.pages.even import attend_evenly
from tutti.accelerator.paged_segments import PagedSegments
from tutti.accelerator.registry import Implementation

WIDEST_HEAD = 256
WINDOWS = {"sliding": 1, "chunked": 2}
PROGRAMS = 528  # keep a chip of 132 units busy: rows are split until there are so many
MOST_SPLITS = 64
MOST_LONG_SPLITS = 16  # of queries of longer rows: one program joins what all splits have
LEAST_SPLIT, LONG_SPLIT = 64, 256  # keys of a split at least: where chips wait, where none does
FEW_QUERIES = 1024  # of a step: more keep the chip busy without splits
UNEQUAL_SPLITS = 8  # of rows that may be far longer than the others
LONGEST_SPLIT = 1024  # keys of a split at most, up to `MOST_SPLITS`, where no chip waits


class _Tile(NamedTuple):
    """How a kernel cuts its work: queries × heads and keys of a tile, warps, pipeline stages."""

    rows: int
    keys: int
    warps: int
    stages: int


# by the padded width of a head: rows of one token, by how many rows of key heads there are
_ONE = {64: _Tile(16, 64, 4, 5), 128: _Tile(16, 64, 4, 2), 256: _Tile(16, 32, 4, 3)}
_FEW = {64: _Tile(16, 64, 2, 4), 128: _Tile(16, 64, 2, 4), 256: _Tile(16, 32, 4, 3)}
_MANY = {64: _Tile(16, 16, 1, 4), 128: _Tile(16, 16, 1, 4), 256: _Tile(16, 16, 2, 4)}
FEWEST_OF_MANY = 256  # rows of key heads: with fewer, programs have little to do one after another
# few queries keep the chip busy when tiles are small; many gain by large ones
_CHUNK = {64: _Tile(64, 64, 4, 3), 128: _Tile(64, 64, 4, 3), 256: _Tile(32, 32, 4, 3)}
_LONG = {64: _Tile(128, 64, 4, 3), 128: _Tile(256, 64, 8, 3), 256: _Tile(64, 32, 4, 3)}


def paged_attention(
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    steps: PagedSegments,
    *,
    scale: float,
    window: int | None = None,
    window_kind: str = "sliding",
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    slopes_rounded: bool = False,
    slopes_factor: float = 1.0,
) -> Tensor:
    """Return (T, H, E), as the reference does."""
    switches: dict[str, Any] = {
        "WINDOW": 0 if window is None else WINDOWS[window_kind],
        "HAS_CAP": soft_cap is not None,
        "HAS_SINK": sinks is not None,
        "HAS_SLOPE": slopes is not None,
        "ROUNDED": slopes_rounded,
    }
    numbers = (scale, soft_cap or 1.0, window or 1, slopes_factor)
    only_single = steps.most_queries <= 1
    alone = only_single and steps.key_lengths.shape[0] >= q.shape[0]
    shape = (q.shape[0], q.shape[1], value_pages.shape[-1])
    out = q.new_empty(shape) if alone else q.new_zeros(shape)
    if not out.numel():
        return out
    given = (q, key_pages, value_pages, steps, sinks, slopes, numbers, switches)
    _single(out, *given, alone=alone)
    if not only_single:
        _long(out, *given)
    return out


def _single(
    out: Tensor,
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    steps: PagedSegments,
    sinks: Tensor | None,
    slopes: Tensor | None,
    numbers: tuple[float, float, int, float],
    switches: dict[str, Any],
    *,
    alone: bool,
) -> None:
    """Fill in rows of one query."""
    rows, groups = steps.key_lengths.shape[0], key_pages.shape[2]
    heads, width, value_width = q.shape[1], q.shape[2], value_pages.shape[3]
    lines = rows * groups
    many = lines > FEWEST_OF_MANY
    tile = _tile(_MANY if many else _ONE if rows == 1 else _FEW, q, value_pages)
    programs = num_programs(q, 8 if many else 4)
    most_heads = max(tile.rows, power_of_two(heads // groups))
    # of each program: what it has of the row that it begins with, and of the one it ends with
    parts = out.new_empty((programs, 2, most_heads, value_width), dtype=torch.float32)
    sums = out.new_empty((programs, 2, most_heads, 2), dtype=torch.float32)
    attend_evenly[(programs,)](
        q, key_pages, value_pages, out, parts, sums, zero_counters(out.device, lines),
        steps.query_starts, steps.key_lengths, steps.tables, sinks, slopes, q.stride(0),
        q.stride(1), *key_pages.stride()[:3], *value_pages.stride()[:3], steps.tables.stride(0),
        rows, q.shape[0], *numbers, HEADS=heads, GROUPS=groups, M=most_heads, D=width,
        E=value_width, WIDE_D=max(16, power_of_two(width)),
        WIDE_E=max(16, power_of_two(value_width)), N=tile.keys, SIZE=steps.page_size,
        ROWS=max(32, power_of_two(rows)), ZERO=alone,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", **switches,
        num_warps=min(8, max(tile.warps, most_heads // 16)), num_stages=tile.stages, **early(q),
    )  # fmt: skip


class Splits(NamedTuple):
    """How the keys of a row are cut, and memory for what each split gives."""

    most: int  # of a row
    least: int  # keys of one, at least
    parts: Tensor  # (lines, H, count, E): lines are rows where each has one query, else tokens
    sums: Tensor  # (lines, H, count, 2): highest score and sum of weights
    counters: Tensor  # by row and group of heads: how many are done; 0 between calls

    @classmethod
    def none(cls, out: Tensor) -> Splits:
        """Return a single split: a program takes all keys of its queries."""
        return cls(1, 1, out, out, out)

    @classmethod
    def of(
        cls,
        out: Tensor,
        lines: int,
        rows: int,
        groups: int,
        most_keys: int,
        tile: int,
        tiles: int | None = None,
        most: int = MOST_SPLITS,
    ) -> Splits:
        """Return splits for rows of so many keys at most, which keep the chip busy.

        `tiles`: how many programs a group has, where some find nothing to do.
        """
        programs = rows * groups
        wanted = -(-PROGRAMS // programs)
        least = max(tile, LEAST_SPLIT if wanted > 2 else LONG_SPLIT)
        longest = LONGEST_SPLIT if programs > 2 * PROGRAMS else least
        wanted = max(wanted, min(UNEQUAL_SPLITS, -(-most_keys // longest)))
        # a power of two: a kernel is compiled for each
        count = power_of_two(max(1, min(most, wanted, -(-most_keys // least))))
        if count == 1:
            return cls.none(out)
        _, heads, width = out.shape
        parts = out.new_empty((lines, heads, count, width), dtype=torch.float32)
        sums = out.new_empty((lines, heads, count, 2), dtype=torch.float32)
        return cls(count, least, parts, sums, zero_counters(out.device, (tiles or rows) * groups))


def _long(
    out: Tensor,
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    steps: PagedSegments,
    sinks: Tensor | None,
    slopes: Tensor | None,
    numbers: tuple[float, float, int, float],
    switches: dict[str, Any],
) -> None:
    """Fill in rows of several queries."""
    heads = key_pages.shape[2]
    few = steps.num_queries <= FEW_QUERIES
    tile = _tile(_CHUNK if few else _LONG, q, value_pages)
    queries = max(1, tile.rows // power_of_two(q.shape[1] // heads))
    busy = -(-steps.num_queries // queries)
    tiles = steps.num_queries // queries + steps.num_long
    splits = Splits.none(out)
    if few:
        least = 4 * tile.keys
        splits = Splits.of(
            out, q.shape[0], busy, heads, steps.most_keys, least, tiles, MOST_LONG_SPLITS
        )
    _launch(
        (tiles, heads, splits.most), tile, queries, out, splits, q, key_pages, value_pages, steps,
        sinks, slopes, numbers, switches,
    )  # fmt: skip


def _launch(
    grid: tuple[int, int, int],
    tile: _Tile,
    queries: int,
    out: Tensor,
    splits: Splits,
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    steps: PagedSegments,
    sinks: Tensor | None,
    slopes: Tensor | None,
    numbers: tuple[float, float, int, float],
    switches: dict[str, Any],
) -> None:
    heads, share = q.shape[1], q.shape[1] // key_pages.shape[2]
    kernels.attend[grid](
        q, key_pages, value_pages, out, splits.parts, splits.sums, splits.counters,
        steps.query_starts, steps.key_lengths, steps.first_long, steps.tables, sinks, slopes,
        q.stride(0), q.stride(1), *key_pages.stride()[:3], *value_pages.stride()[:3],
        steps.tables.stride(0), steps.key_lengths.shape[0], *numbers,
        LEAST=splits.least, SPLITS=splits.most, HEADS=heads, SHARE=share,
        WIDE_SHARE=power_of_two(share), QUERIES=queries, D=q.shape[2], E=value_pages.shape[3],
        WIDE_D=max(16, power_of_two(q.shape[2])),
        WIDE_E=max(16, power_of_two(value_pages.shape[3])), N=tile.keys, SIZE=steps.page_size,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", **switches,
        SORTED=steps.first_long is not None, num_warps=tile.warps, num_stages=tile.stages,
        **early(q),
    )  # fmt: skip


def _tile(tiles: dict[int, _Tile], q: Tensor, value_pages: Tensor) -> _Tile:
    wide = power_of_two(max(q.shape[2], value_pages.shape[3]))
    found = tiles[next(width for width in tiles if wide <= width)]
    if q.dtype == torch.float32:
        return found._replace(keys=max(16, found.keys // 2), stages=1)
    return found


def _reason(
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    _steps: PagedSegments,
    **_options: Any,
) -> str | None:
    """Say why the kernels cannot take a call, or None."""
    if q.dtype not in DTYPES:
        return f"no {str(q.dtype).removeprefix('torch.')}"
    if max(q.shape[-1], value_pages.shape[-1]) > WIDEST_HEAD:
        return f"a head wider than {WIDEST_HEAD}"
    if any(tensor.stride(-1) != 1 for tensor in (q, key_pages, value_pages)):
        return "elements of a head that do not follow each other"
    return None


IMPLEMENTATIONS = (
    Implementation(
        operator="paged_attention",
        name="triton",
        function=paged_attention,
        devices=("cuda",),
        supports=_reason,
        rank=20,
        exact=False,
        needs="triton",
    ),
)
