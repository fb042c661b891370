"""Attention to keys in pages, and what writes them, in Triton."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tutti.accelerator.cuda.common import DTYPES, num_programs, power_of_two, zero_counters
from tutti.accelerator.cuda.early_launch import early
from tutti.accelerator.cuda.pages import kernels
from tutti.accelerator.cuda.pages.even import attend_evenly
from tutti.accelerator.paged_segments import PagedSegments
from tutti.accelerator.registry import Implementation

WIDEST_HEAD = 256
WINDOWS = {"sliding": 1, "chunked": 2}
CODES = (torch.int8, torch.float8_e4m3fn)
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


class Pages(NamedTuple):
    """Keys and values, or codes of 8 bits with a scale for each place and head."""

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    @property
    def strides(self) -> tuple[int, ...]:
        """Of page, place and head: the keys', then the values'."""
        return (*self.keys.stride()[:3], *self.values.stride()[:3])


class Scoring(NamedTuple):
    """What a layer does to its scores, as the kernels are told."""

    numbers: tuple[float, float, int, float]
    switches: dict[str, Any]
    sinks: Tensor | None
    slopes: Tensor | None

    @classmethod
    def of(
        cls,
        *,
        scale: float,
        window: int | None = None,
        window_kind: str = "sliding",
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
        slopes: Tensor | None = None,
        slopes_rounded: bool = False,
        slopes_factor: float = 1.0,
    ) -> Scoring:
        """Return an operator's options."""
        switches: dict[str, Any] = {
            "WINDOW": 0 if window is None else WINDOWS[window_kind],
            "HAS_CAP": soft_cap is not None,
            "HAS_SINK": sinks is not None,
            "HAS_SLOPE": slopes is not None,
            "ROUNDED": slopes_rounded,
        }
        numbers = (scale, soft_cap or 1.0, window or 1, slopes_factor)
        return cls(numbers, switches, sinks, slopes)


def paged_attention(
    q: Tensor, key_pages: Tensor, value_pages: Tensor, steps: PagedSegments, **options: Any
) -> Tensor:
    """Return (T, H, E), as the reference does."""
    return _attended(q, Pages(key_pages, value_pages), steps, Scoring.of(**options))


def quantised_paged_attention(
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    key_scales: Tensor,
    value_scales: Tensor,
    steps: PagedSegments,
    **options: Any,
) -> Tensor:
    """Return the same of pages of 8 bits; codes are widened in registers."""
    pages = Pages(key_pages, value_pages, key_scales, value_scales)
    return _attended(q, pages, steps, Scoring.of(**options))


def fixed_paged_attention(
    q: Tensor, key_pages: Tensor, value_pages: Tensor, steps: PagedSegments, **options: Any
) -> Tensor:
    """Return the same, a token's bits being the same in any batch, chunk and pages.

    A program takes all keys of its queries, tile by tile from the sequence's beginning, whether the
    row has one query or many: tiles in which a query sees nothing change no bit of it.
    """
    out = q.new_zeros(q.shape[0], q.shape[1], value_pages.shape[-1])
    if not out.numel():
        return out
    groups = key_pages.shape[2]
    tile = _tile(_CHUNK, q, value_pages)
    queries = max(1, tile.rows // power_of_two(q.shape[1] // groups))
    rows = steps.key_lengths.shape[0]
    single = steps.most_queries <= 1
    tiles = rows if single else steps.num_queries // queries + rows
    any_order = replace(steps, first_long=None)
    _launch(
        (tiles, groups, 1), tile, queries, out, Splits.none(out), q, Pages(key_pages, value_pages),
        any_order, Scoring.of(**options), fixed=1 if single else 2,
    )  # fmt: skip
    return out


def _attended(q: Tensor, pages: Pages, steps: PagedSegments, scoring: Scoring) -> Tensor:
    only_single = steps.most_queries <= 1
    alone = only_single and steps.key_lengths.shape[0] >= q.shape[0]
    shape = (q.shape[0], q.shape[1], pages.values.shape[-1])
    out = q.new_empty(shape) if alone else q.new_zeros(shape)
    if not out.numel():
        return out
    _single(out, q, pages, steps, scoring, alone=alone)
    if not only_single:
        _long(out, q, pages, steps, scoring)
    return out


def _single(
    out: Tensor,
    q: Tensor,
    pages: Pages,
    steps: PagedSegments,
    scoring: Scoring,
    *,
    alone: bool,
) -> None:
    """Fill in rows of one query."""
    rows, groups = steps.key_lengths.shape[0], pages.keys.shape[2]
    heads, width, value_width = q.shape[1], q.shape[2], pages.values.shape[3]
    lines = rows * groups
    many = lines > FEWEST_OF_MANY
    tile = _tile(_MANY if many else _ONE if rows == 1 else _FEW, q, pages.values)
    programs = num_programs(q, 8 if many else 4)
    most_heads = max(tile.rows, power_of_two(heads // groups))
    # of each program: what it has of the row that it begins with, and of the one it ends with
    parts = out.new_empty((programs, 2, most_heads, value_width), dtype=torch.float32)
    sums = out.new_empty((programs, 2, most_heads, 2), dtype=torch.float32)
    attend_evenly[(programs,)](
        q, *pages, out, parts, sums, zero_counters(out.device, lines), steps.query_starts,
        steps.key_lengths, steps.tables, scoring.sinks, scoring.slopes, q.stride(0), q.stride(1),
        *pages.strides, steps.tables.stride(0), rows, q.shape[0], *scoring.numbers,
        HEADS=heads, GROUPS=groups, M=most_heads, D=width, E=value_width,
        WIDE_D=max(16, power_of_two(width)), WIDE_E=max(16, power_of_two(value_width)),
        N=tile.keys, SIZE=steps.page_size, ROWS=max(32, power_of_two(rows)), ZERO=alone,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", **scoring.switches,
        SCALED=pages.key_scales is not None, num_warps=min(8, max(tile.warps, most_heads // 16)),
        num_stages=tile.stages, **early(q),
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
    pages: Pages,
    steps: PagedSegments,
    scoring: Scoring,
) -> None:
    """Fill in rows of several queries."""
    heads = pages.keys.shape[2]
    few = steps.num_queries <= FEW_QUERIES
    tile = _tile(_CHUNK if few else _LONG, q, pages.values)
    queries = max(1, tile.rows // power_of_two(q.shape[1] // heads))
    busy = -(-steps.num_queries // queries)
    tiles = steps.num_queries // queries + steps.num_long
    splits = Splits.none(out)
    if few:
        least = 4 * tile.keys
        splits = Splits.of(
            out, q.shape[0], busy, heads, steps.most_keys, least, tiles, MOST_LONG_SPLITS
        )
    _launch((tiles, heads, splits.most), tile, queries, out, splits, q, pages, steps, scoring)


def _launch(
    grid: tuple[int, int, int],
    tile: _Tile,
    queries: int,
    out: Tensor,
    splits: Splits,
    q: Tensor,
    pages: Pages,
    steps: PagedSegments,
    scoring: Scoring,
    *,
    fixed: int = 0,
) -> None:
    heads, share = q.shape[1], q.shape[1] // pages.keys.shape[2]
    kernels.attend[grid](
        q, *pages, out, splits.parts, splits.sums, splits.counters, steps.query_starts,
        steps.key_lengths, steps.first_long, steps.tables, scoring.sinks, scoring.slopes,
        q.stride(0), q.stride(1), *pages.strides, steps.tables.stride(0),
        steps.key_lengths.shape[0], *scoring.numbers,
        LEAST=splits.least, SPLITS=splits.most, HEADS=heads, SHARE=share,
        WIDE_SHARE=power_of_two(share), QUERIES=queries, D=q.shape[2], E=pages.values.shape[3],
        WIDE_D=max(16, power_of_two(q.shape[2])),
        WIDE_E=max(16, power_of_two(pages.values.shape[3])), N=tile.keys, SIZE=steps.page_size,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", **scoring.switches,
        SCALED=pages.key_scales is not None, FIXED=fixed,
        SORTED=steps.first_long is not None, num_warps=tile.warps, num_stages=tile.stages,
        **early(q),
    )  # fmt: skip


def _tile(tiles: dict[int, _Tile], q: Tensor, value_pages: Tensor) -> _Tile:
    wide = power_of_two(max(q.shape[2], value_pages.shape[3]))
    tile = tiles[next(width for width in tiles if wide <= width)]
    if q.dtype == torch.float32:
        return tile._replace(keys=max(16, tile.keys // 2), stages=1)
    return tile


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


def _reason_quantised(
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    key_scales: Tensor,
    value_scales: Tensor,
    steps: PagedSegments,
    **options: Any,
) -> str | None:
    """Say why the kernels cannot take pages of 8 bits, or None."""
    if key_pages.dtype not in CODES or value_pages.dtype not in CODES:
        return "codes of int8 or float8_e4m3fn only"
    if not (key_scales.is_contiguous() and value_scales.is_contiguous()):
        return "scales that are part of something"
    return _reason(q, key_pages, value_pages, steps, **options)


IMPLEMENTATIONS = (
    Implementation(
        operator="quantised_paged_attention",
        name="triton",
        function=quantised_paged_attention,
        devices=("cuda",),
        supports=_reason_quantised,
        rank=20,
        exact=False,
        needs="triton",
    ),
    Implementation(
        operator="paged_attention",
        name="fixed",
        function=fixed_paged_attention,
        devices=("cuda",),
        supports=_reason,
        rank=-10,
        exact=False,
        needs="triton",
        invariant=True,
    ),
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
