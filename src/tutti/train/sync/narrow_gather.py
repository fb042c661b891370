"""Parameters that come for a pass in 8 bits: what a product of 8 bits would make of them anyway.

A shard of a span is written as bytes: a power of two for each row that lies in it, or part of one;
the rows' numbers in e4m3, divided by it; then everything that is not multiplied in 8 bits, as it
is. A row that lies in one shard is multiplied as if it had come in bf16, to the bit: rounding it
once more changes nothing. Of a row that a border cuts each part has a power of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tutti.accelerator.reference.narrow import NARROW, Narrow, narrowed
from tutti.ownership.ownership import Block

NOT_A_NUMBER = 255  # in the place of an exponent


@dataclass(frozen=True, slots=True)
class _Part:
    """Elements of a shard that follow each other: `rows` rows of `width`, or wide ones."""

    start: int  # in the shard
    rows: int
    width: int
    narrow: bool

    @property
    def size(self) -> int:
        return self.rows * self.width


class NarrowShard:
    """How the elements of a span from `low` to `high` are written as bytes."""

    def __init__(
        self, blocks: Sequence[Block], narrow: Sequence[bool], low: int, high: int
    ) -> None:
        self.size = high - low
        self._parts = list(_parts(blocks, narrow, low, high))
        self._rows = sum(part.rows for part in self._parts if part.narrow)
        self._narrow = sum(part.size for part in self._parts if part.narrow)

    @property
    def num_bytes(self) -> int:
        """What it is long: exponents, numbers of 8 bits, numbers of 16."""
        filled = self._narrow + self._rows
        return filled + filled % 2 + 2 * (self.size - self._narrow)  # wide ones begin evenly

    def write(self, shard: Tensor) -> Tensor:
        """Return the bytes of a shard in bf16."""
        narrow = [
            narrowed(shard[part.start : part.start + part.size].view(part.rows, part.width))
            for part in self._parts
            if part.narrow
        ]
        exponents = [_exponents(each.scales) for each in narrow]
        values = [each.values.reshape(-1).view(torch.uint8) for each in narrow]
        fill = shard.new_zeros((self._narrow + self._rows) % 2, dtype=torch.uint8)
        wide = [
            shard[part.start : part.start + part.size].view(torch.uint8)
            for part in self._parts
            if not part.narrow
        ]
        return torch.cat([*exponents, *values, fill, *wide])

    def read(self, message: Tensor, out: Tensor) -> None:
        """Write what a message says into the elements that it is of."""
        at_exponent, at_value = 0, self._rows
        at_wide = self._rows + self._narrow
        at_wide += at_wide % 2
        for part in self._parts:
            target = out[part.start : part.start + part.size]
            if not part.narrow:
                target.copy_(message[at_wide : at_wide + 2 * part.size].clone().view(out.dtype))
                at_wide += 2 * part.size
                continue
            scales = _scales(message[at_exponent : at_exponent + part.rows])
            values = message[at_value : at_value + part.size].view(NARROW)
            rows = Narrow(values.view(part.rows, part.width), scales).wide(out.dtype)
            target.copy_(rows.reshape(-1))
            at_exponent, at_value = at_exponent + part.rows, at_value + part.size


class NarrowGather:
    """The messages of all holders of a span."""

    def __init__(
        self, blocks: Sequence[Block], narrow: Sequence[bool], bounds: Sequence[int]
    ) -> None:
        self._shards = [
            NarrowShard(blocks, narrow, low, high) for low, high in itertools.pairwise(bounds)
        ]
        self._bounds = list(bounds)
        self.counts = tuple(shard.num_bytes for shard in self._shards)

    def write(self, holder: int, shard: Tensor) -> Tensor:
        """Return the message of the holder with this number."""
        return self._shards[holder].write(shard)

    def read(self, messages: Tensor, whole: Tensor) -> None:
        """Write all messages, one after the other, into the whole span."""
        parts = messages.split(self.counts)
        pairs = itertools.pairwise(self._bounds)
        for own, message, (low, high) in zip(self._shards, parts, pairs, strict=True):
            own.read(message, whole[low:high])


def _parts(blocks: Sequence[Block], narrow: Sequence[bool], low: int, high: int) -> Iterator[_Part]:
    """Yield what a shard consists of: whole rows together, parts of rows at its borders."""
    offset = 0
    for block, is_narrow in zip(blocks, narrow, strict=True):
        start, stop = max(low, offset), min(high, offset + block.size)
        if start < stop and not is_narrow:
            yield _Part(start - low, 1, stop - start, False)
        elif start < stop:
            width = block.shape[-1]
            first = min(stop, start + (offset - start) % width)  # where the first whole row begins
            last = max(first, stop - (stop - offset) % width)
            if start < first:
                yield _Part(start - low, 1, first - start, True)
            if first < last:
                yield _Part(first - low, (last - first) // width, width, True)
            if last < stop:
                yield _Part(last - low, 1, stop - last, True)
        offset += block.size


def _exponents(scales: Tensor) -> Tensor:
    """Return powers of two as bytes."""
    bits = scales.contiguous().view(torch.int32) >> 23
    return torch.where(scales.isnan(), NOT_A_NUMBER, bits).to(torch.uint8)


def _scales(exponents: Tensor) -> Tensor:
    bits = exponents.to(torch.int32) << 23
    return torch.where(exponents == NOT_A_NUMBER, float("nan"), bits.view(torch.float32))
