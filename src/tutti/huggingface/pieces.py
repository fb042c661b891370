"""How a logical tensor lies in the files: as pieces, each a view of one stored tensor.

A piece says: rows `start` to `stop` of the logical tensor are the stored tensor, seen with the
dimensions `view`, at `index`, with its dimensions in `order`. Every layout in use (transposed,
fused, interleaved, one file tensor per expert) is such a view, so one piece of code reads and
writes them all, no byte changes on the way, and a slice is read without the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tutti.huggingface.dtypes import Dtype
from tutti.huggingface.tensor_file import Raw

Bounds = tuple[tuple[int, int], ...]  # half-open, one for each dimension
Index = tuple[int | slice | EllipsisType, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a logical tensor as a view of a stored one."""

    key: str
    shape: tuple[int, ...]  # of the whole stored tensor
    start: int  # of the logical tensor's dimension 0
    stop: int
    view: tuple[int, ...] = ()  # empty: as it is
    index: Index = ()
    order: tuple[int, ...] = ()  # empty: as it is

    @property
    def plain(self) -> bool:
        """Whether the stored tensor *is* these rows, byte for byte."""
        return not self.index and not self.order

    def seen(self, stored: Raw) -> Raw:
        """Return the piece as a view of the stored tensor."""
        view = stored.reshape(self.view) if self.view else stored
        view = view[self.index] if self.index else view
        return view.transpose(self.order) if self.order else view


def stored_rows(piece: Piece) -> NDArray[np.int64] | None:
    """Return which outputs of a stored weight a piece's rows are; None: it is no matrix's.

    A weight's outputs are its rows, or its columns where it is stored transposed.
    """
    if len(piece.shape) != 2:
        return None
    axis = 1 if piece.order else 0
    outputs = np.arange(piece.shape[axis])
    standing = outputs[None, :] if axis else outputs[:, None]
    numbers: NDArray[Any] = piece.seen(np.broadcast_to(standing, piece.shape))
    return np.array(numbers[..., 0]).reshape(-1)


def whole(shape: Sequence[int]) -> Bounds:
    """Return the bounds of a whole tensor."""
    return tuple((0, size) for size in shape)


def gather(
    pieces: Sequence[Piece],
    shape: tuple[int, ...],
    bounds: Bounds,
    dtype: Dtype,
    stored: Callable[[str], Raw],
) -> Raw:
    """Return a slice of a logical tensor, assembled from its pieces."""
    out = np.empty([stop - start for start, stop in bounds], dtype.raw)
    if not shape:
        out[...] = pieces[0].seen(stored(pieces[0].key)).reshape(())
        return out
    (first, last), rest = bounds[0], bounds[1:]
    for piece in pieces:
        low, high = max(first, piece.start), min(last, piece.stop)
        if low >= high:
            continue
        part_shape = (piece.stop - piece.start, *shape[1:])
        inside = ((low - piece.start, high - piece.start), *rest)
        part = _narrowed(piece.seen(stored(piece.key)), part_shape, inside)
        # The rows of a fresh array are contiguous: any finer view of them is free.
        out[low - first : high - first].reshape(part.shape)[...] = part
    return out


def _narrowed(seen: Raw, shape: tuple[int, ...], bounds: Bounds) -> Raw:
    """Return a slice of what `seen` is when reshaped to `shape`, without copying where possible.

    One dimension of `shape` may be several of `seen` (heads, width of a head). A slice that falls
    on the boundaries of the first of them is a slice of that; another one needs a copy.
    """
    seen = seen.squeeze()
    cuts: list[slice] = []
    axis = 0
    for size, (start, stop) in zip(shape, bounds, strict=True):
        group: list[int] = []
        while math.prod(group) < size:
            group.append(seen.shape[axis + len(group)])
        if not group:
            if stop <= start:
                return np.empty([b - a for a, b in bounds], seen.dtype)
            continue
        inner = math.prod(group[1:])
        if start % inner or stop % inner:
            inside = tuple(slice(a, b) for a, b in bounds)
            return np.ascontiguousarray(seen).reshape(shape)[inside]
        cuts += [slice(start // inner, stop // inner), *[slice(None)] * (len(group) - 1)]
        axis += len(group)
    return seen[tuple(cuts)]


def scatter(
    parts: Sequence[tuple[str, Piece]],
    dtype: Dtype,
    rows: Callable[[str, int, int], Raw],
) -> Raw:
    """Return a whole stored tensor, assembled from the logical ones that it holds."""
    stored = np.empty(parts[0][1].shape, dtype.raw)
    for name, piece in parts:
        target = piece.seen(stored)
        target[...] = rows(name, piece.start, piece.stop).reshape(target.shape)
    return stored
