"""Columns in 8 bits: what a product that sums over tokens takes, its operands turned.

Experts sum over runs of rows. Each run is turned by itself, begins at a multiple of `TILE` and is
filled up with zeros, as kernels ask of what they sum over; the host does not learn where it ends.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tutti.accelerator.cuda.common import power_of_two
from tutti.accelerator.reference.narrow import NARROW, Narrow

TILE = 64
COLUMNS = 128  # that a program looks at
LOOK, DEEP = 16, 32  # rows at a time in which a program looks for the largest numbers, and times


@triton.jit
def scale_and_inverse(top):
    """Return the least power of two that brings a number into e4m3's range, and one over it."""
    bits = top.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 135 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = tl.minimum(tl.maximum(exponent, -126), 126)
    scale = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    inverse = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    return tl.where(top < float("inf"), scale, float("nan")), inverse


@triton.jit
def _run_of(tile, ends, num_runs, RUNS: tl.constexpr, TILE: tl.constexpr):
    """Return a tile's run, its first row, the run's end and first tile; then all runs' ends.

    A tile behind all runs has no rows: its first one is not before its end.
    """
    run = tl.arange(0, RUNS)
    there = run < num_runs
    end = tl.load(ends + run, mask=there, other=0)
    start = tl.load(ends + run - 1, mask=there & (run > 0), other=0)
    tiles = tl.where(there, (end - start + TILE - 1) // TILE, 0)
    upto = tl.cumsum(tiles, 0)
    own = tl.minimum(tl.sum((upto <= tile).to(tl.int32), 0), num_runs - 1)
    here = run == own
    before = tl.sum(tl.where(here, upto - tiles, 0), 0)
    first = tl.sum(tl.where(here, start, 0), 0) + (tile - before) * TILE
    return own, first, tl.sum(tl.where(here, end, 0), 0), before, upto * TILE


@triton.jit
def _largest_in_columns(
    x, rows_by, ends, largest, rows, width, step, num_runs,
    RUNS: tl.constexpr, LOOK: tl.constexpr, DEEP: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Let each column's largest number be known, each row times its own; the bits order alike."""
    first, last = tl.program_id(1) * (LOOK * DEEP), rows
    if RUNS > 0:
        own, first, last, _, _ = _run_of(tl.program_id(1), ends, num_runs, RUNS, LOOK * DEEP)
        largest += own * width
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    top = tl.zeros((LOOK, COLUMNS), tl.float32)
    for deep in range(DEEP):
        row = first + deep * LOOK + tl.arange(0, LOOK)
        inside = (row < last)[:, None] & (column < width)[None, :]
        at = row.to(tl.int64)[:, None] * step + column[None, :]
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        value *= tl.load(rows_by + row, mask=row < last, other=0.0)[:, None]
        # what is no number counts as more than any
        top = tl.maximum(top, tl.where(value == value, tl.abs(value), float("inf")))
    bits = tl.max(top, 0).to(tl.int32, bitcast=True)
    tl.atomic_max(largest + column, bits, mask=(column < width) & (first < last))


@triton.jit
def _turn(
    x, rows_by, ends, largest, out, scales, out_ends, rows, width, step, out_step, num_runs,
    SCALED: tl.constexpr, RUNS: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the transpose of a tile: as it is, or in 8 bits by the columns' largest numbers."""
    tile = tl.program_id(1)
    own, first, last, before = 0, tile * TILE, rows, 0
    if RUNS > 0:
        own, first, last, before, stops = _run_of(tile, ends, num_runs, RUNS, TILE)
        if (tile == 0) & (tl.program_id(0) == 0):
            run = tl.arange(0, RUNS)
            tl.store(out_ends + run, stops, mask=run < num_runs)
    row = first + tl.arange(0, TILE)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < last)[:, None] & (column < width)[None, :]
    at = row.to(tl.int64)[:, None] * step + column[None, :]
    value = tl.load(x + at, mask=inside, other=0)
    if SCALED:
        place = own * width + column
        top = tl.load(largest + place, mask=column < width, other=0.0)
        scale, inverse = scale_and_inverse(top)
        tl.store(scales + place, scale, mask=(column < width) & (tile == before) & (first < last))
        value = value.to(tl.float32) * tl.load(rows_by + row, mask=row < last, other=0.0)[:, None]
        value = (value * inverse[None, :]).to(out.dtype.element_ty)
    at_row = tile * TILE + tl.arange(0, TILE)
    to = column.to(tl.int64)[:, None] * out_step + at_row[None, :]
    there = (column < width)[:, None] & (at_row < out_step)[None, :]
    tl.store(out + to, tl.trans(value), mask=there)


def _programs(x: Tensor, ends: Tensor | None, tile: int) -> tuple[int, int]:
    """Return how many programs take all columns and, in tiles, all rows; a run begins a tile."""
    rows, width = x.shape
    tiles = triton.cdiv(rows, tile) + (0 if ends is None else len(ends))
    return triton.cdiv(width, COLUMNS), tiles


def _room(x: Tensor, ends: Tensor | None) -> tuple[tuple[int, int], int]:
    """Return the programs that turn rows, and how long the turned ones are at most."""
    grid = _programs(x, ends, TILE)
    return grid, x.shape[0] if ends is None else grid[1] * TILE


def _runs(ends: Tensor | None) -> dict[str, int]:
    count = 0 if ends is None else len(ends)
    return {"num_runs": count, "RUNS": max(2, power_of_two(count)) if count else 0}


def narrowed_columns(
    x: Tensor, rows_by: Tensor, ends: Tensor | None = None
) -> tuple[Narrow, Tensor | None]:
    """Return the transpose of rows, each times its number, in 8 bits with a scale per column.

    With `ends` each run of rows has scales of its own; where it ends in the result comes, too.
    """
    rows, width = x.shape
    count = 1 if ends is None else len(ends)
    largest, scales = torch.zeros((2, count * width), dtype=torch.float32, device=x.device)
    grid, length = _room(x, ends)
    out = torch.empty((width, length), dtype=NARROW, device=x.device)
    stops = None if ends is None else torch.empty_like(ends)
    options = {**_runs(ends), "COLUMNS": COLUMNS, "num_warps": 8}
    runs = scales if ends is None else ends
    _largest_in_columns[_programs(x, ends, LOOK * DEEP)](
        x, rows_by, runs, largest.view(torch.int32), rows, width, x.stride(0), LOOK=LOOK,
        DEEP=DEEP, **options,
    )  # fmt: skip
    _turn[grid](
        x, rows_by, runs, largest, out, scales, runs if stops is None else stops, rows, width,
        x.stride(0), length, SCALED=True, TILE=TILE, **options,
    )  # fmt: skip
    return Narrow(out, scales), stops


def turned(x: Tensor, ends: Tensor | None = None) -> Tensor:
    """Return the transpose of numbers of 8 bits as they are, run by run where `ends` is given."""
    rows, width = x.shape
    grid, length = _room(x, ends)
    out = torch.empty((width, length), dtype=x.dtype, device=x.device)
    plain = x.view(torch.int8)
    runs = plain if ends is None else ends
    stops = plain if ends is None else torch.empty_like(ends)
    _turn[grid](
        plain, plain, runs, plain, out.view(torch.int8), plain, stops, rows, width, x.stride(0),
        length, SCALED=False, **_runs(ends), TILE=TILE, COLUMNS=COLUMNS, num_warps=8,
    )  # fmt: skip
    return out
