"""`QuantisedWeight`: a weight of 8 or 4 bits, in the one form that every folder's format becomes.

An element is (code − zero) · scale. Scale and zero are those of its block of rows and columns: all
of them (a scale per tensor), one row (per channel), some columns of a row (groups), or 128 × 128.
Codes are 8-bit floats, 8-bit integers, or 4-bit integers −8 to 7, stored as 0 to 15, two columns in
a byte, the first in its low half; with `levels` a 4-bit code is one of 16 numbers instead (NF4).
Some files sort columns by their group: `order` says which input each column belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tutti.errors import InputError

FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True, eq=False, kw_only=True)
class QuantisedWeight:
    """A weight (out, in), or one of each expert (E, out, in)."""

    codes: Tensor  # (…, out, in): float8 or int8; (…, out, in ÷ 2): uint8, two in a byte
    scales: Tensor  # (…, blocks of rows, blocks of columns)
    zeros: Tensor | None  # as the scales, integers; None: 0
    block: tuple[int, int]  # rows and columns of one scale
    order: Tensor | None = None  # (in,): the input of each column
    levels: Tensor | None = None  # (16,): what the codes 0 to 15 stand for; None: code − 8
    widens: bool = False  # products are made with the wide weight: training only reads it
    narrow_inputs: bool = False  # each row it is multiplied with is rounded to 8 bits, too
    laid_out: dict[str, Any] = field(default_factory=dict, repr=False)  # by devices, for products

    @property
    def kind(self) -> str:
        """As a user calls it."""
        if self.codes.dtype in FLOATS:
            return "fp8"
        if self.levels is not None:
            return "nf4"
        return "int4" if self.halves else "int8"

    @property
    def halves(self) -> bool:
        """Whether a byte holds two codes."""
        return self.codes.dtype == torch.uint8

    @property
    def shape(self) -> torch.Size:
        """Of the weight that it stands for."""
        *rows, columns = self.codes.shape
        return torch.Size((*rows, columns * 2 if self.halves else columns))

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.codes.device

    @property
    def num_bytes(self) -> int:
        """What it takes in memory, without other layouts."""
        parts = (self.codes, self.scales, self.zeros, self.order)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)

    def to(self, device: torch.device | str) -> QuantisedWeight:
        """Return the same on a device."""
        return replace(
            self,
            codes=self.codes.to(device),
            scales=self.scales.to(device),
            zeros=None if self.zeros is None else self.zeros.to(device),
            order=None if self.order is None else self.order.to(device),
            levels=None if self.levels is None else self.levels.to(device),
            laid_out={},
        )

    def expert(self, number: int) -> QuantisedWeight:
        """Return the weight of one expert."""
        return replace(
            self,
            codes=self.codes[number],
            scales=self.scales[number],
            zeros=None if self.zeros is None else self.zeros[number],
            laid_out={},
        )

    def rows(self, index: Tensor) -> QuantisedWeight:
        """Return some outputs, in any order."""
        own = self.by_rows()
        scales, zeros = own._scaling
        return replace(
            own,
            codes=_indexed(own.codes, index),
            scales=scales if scales.shape[-2] == 1 else scales[..., index, :],
            zeros=zeros if zeros is None or zeros.shape[-2] == 1 else zeros[..., index, :],
            laid_out={},
        )

    def part(self, rows: slice, columns: slice) -> QuantisedWeight:
        """Return a rectangle; columns are cut where blocks end."""
        out, width = self.shape[-2:]
        own = self if rows == slice(0, out) else self.rows(torch.arange(rows.start, rows.stop))
        if columns == slice(0, width):
            return own
        start, stop, block = columns.start, columns.stop, min(own.block[1], width)
        per_row = block == width
        if own.order is not None or (not per_row and (start % block or stop % block)) or start % 2:
            what = "sorted columns" if own.order is not None else f"blocks of {block} columns"
            raise InputError(
                f"a quantised weight with {what} cannot be cut at columns {start} to {stop}; take "
                "fewer tensor-parallel ranks"
            )
        blocks = slice(None) if per_row else slice(start // block, stop // block)
        codes = slice(start // 2, stop // 2) if own.halves else columns
        return replace(
            own,
            codes=own.codes[..., codes].contiguous(),
            scales=own.scales[..., blocks],
            zeros=None if own.zeros is None else own.zeros[..., blocks],
            block=(own.block[0], stop - start if per_row else block),
            laid_out={},
        )

    def inputs(self, x: Tensor) -> Tensor:
        """Return rows with their columns in the order of the codes."""
        return x if self.order is None else x[..., self.order]

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """Return the codes as numbers."""
        if not self.halves:
            return self.codes.to(dtype)
        both = torch.stack((self.codes & 15, self.codes >> 4), dim=-1).flatten(-2)
        return both.to(dtype) - 8 if self.levels is None else self.levels.to(dtype)[both.int()]

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Return the weight that it stands for: computed in float32 at least, then rounded."""
        wide = torch.promote_types(dtype, torch.float32)
        numbers = self.numbers(wide)
        if self.zeros is not None:
            numbers = numbers - self._each(self.zeros.to(wide))
        values = (numbers * self._each(self.scales.to(wide))).to(dtype)
        if self.order is None:
            return values
        return torch.empty_like(values).index_copy_(-1, self.order, values)

    def by_rows(self) -> QuantisedWeight:
        """Return the same with scales for each row."""
        if self.block[0] == 1:
            return self
        out = self.shape[-2]
        parts = [None if t is None else _repeated(t, -2, self.block[0], out) for t in self._scaling]
        assert parts[0] is not None
        return replace(self, scales=parts[0], zeros=parts[1], block=(1, self.block[1]), laid_out={})

    @property
    def _scaling(self) -> tuple[Tensor, Tensor | None]:
        return self.scales, self.zeros

    def _each(self, blocks: Tensor) -> Tensor:
        """Return what blocks have, for each element."""
        out, width = self.shape[-2:]
        return _repeated(_repeated(blocks, -2, self.block[0], out), -1, self.block[1], width)


def _repeated(blocks: Tensor, dim: int, times: int, count: int) -> Tensor:
    if blocks.shape[dim] == 1:
        return blocks.expand(*blocks.shape[:dim], count, *blocks.shape[dim:][1:])
    return blocks.repeat_interleave(times, dim).narrow(dim, 0, count)


def _indexed(codes: Tensor, index: Tensor) -> Tensor:
    """Return rows of codes; 8-bit floats have no such operator everywhere."""
    return codes.view(torch.uint8)[..., index, :].view(codes.dtype)


def joined(parts: Sequence[QuantisedWeight]) -> QuantisedWeight | None:
    """Return the weights of experts as one; None: they are too unlike."""
    if len({part.block for part in parts}) > 1:
        parts = [part.by_rows() for part in parts]
    like = {(part.kind, part.codes.dtype, part.shape, part.block) for part in parts}
    if len(like) > 1 or any(part.order is not None for part in parts):
        return None
    first = parts[0]
    zeros = None
    if any(part.zeros is not None for part in parts):
        zeros = torch.stack([_zeros(part) for part in parts])
    return replace(
        first,
        codes=torch.stack([part.codes.view(torch.uint8) for part in parts]).view(first.codes.dtype),
        scales=torch.stack([part.scales for part in parts]),
        zeros=zeros,
        laid_out={},
    )


def stacked(parts: Sequence[QuantisedWeight]) -> QuantisedWeight | None:
    """Return weights of one input as one, one below the other; None: they are too unlike."""
    if len(parts) == 1:
        return parts[0]
    if len({(part.kind, part.codes.dtype, part.shape[-1], part.block[1]) for part in parts}) > 1:
        return None
    first = parts[0]
    for part in parts[1:]:
        if (part.order is None) != (first.order is None):
            return None
        if part.order is not None and not torch.equal(part.order, first.order):  # type: ignore[arg-type]
            return None
    height = first.block[0]
    whole = all(part.block[0] == height and part.shape[-2] % height == 0 for part in parts[:-1])
    if not whole or parts[-1].block[0] != height:
        parts = [part.by_rows() for part in parts]
    zeros = None
    if any(part.zeros is not None for part in parts):
        zeros = torch.cat([_zeros(part) for part in parts], dim=-2)
    codes = torch.cat([part.codes.view(torch.uint8) for part in parts], dim=-2)
    return QuantisedWeight(
        codes=codes.view(first.codes.dtype),
        scales=torch.cat([part.scales for part in parts], dim=-2),
        zeros=zeros,
        block=parts[0].block,
        order=first.order,
        levels=first.levels,
        widens=first.widens,
        narrow_inputs=first.narrow_inputs,
    )


def _zeros(part: QuantisedWeight) -> Tensor:
    if part.zeros is None:
        return torch.zeros_like(part.scales, dtype=torch.int16)
    return part.zeros.to(torch.int16)
