"""Spans: pieces of memory that travel as one message.

A message may gather several pieces of a tensor (a slice of every section). Bytes of the message are
numbered through, so that it can be cut into fragments anywhere; on the host the pieces are sent and
received in place, as memory views, without a copy.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a one-dimensional contiguous tensor as its bytes."""
    return tensor.view(torch.uint8)


def memory(tensor: Tensor) -> memoryview:
    """Return the memory of a one-dimensional contiguous tensor on the host."""
    view: memoryview = as_bytes(tensor.detach()).numpy().data
    return view


class Spans:
    """One-dimensional contiguous tensors of one dtype, in the order of the message."""

    __slots__ = ("_starts", "itemsize", "num_bytes", "on_host", "tensors")

    def __init__(self, tensors: Sequence[Tensor], *, on_host: bool | None = None) -> None:
        self.tensors = tensors
        self.itemsize = tensors[0].element_size()
        self._starts = [0, *accumulate(t.numel() * self.itemsize for t in tensors)]
        self.num_bytes = self._starts[-1]
        # A chip that is emulated on the host says itself that its tensors are not there.
        self.on_host = tensors[0].device.type == "cpu" if on_host is None else on_host

    def cut(self, start: int, stop: int) -> list[Tensor]:
        """Return bytes [start, stop) of the message as tensors; both lie between elements."""
        if start == 0 and stop == self.num_bytes:
            return list(self.tensors)
        pieces = []
        index = bisect_right(self._starts, start) - 1
        while index < len(self.tensors) and self._starts[index] < stop:
            first = max(start, self._starts[index]) - self._starts[index]
            last = min(stop, self._starts[index + 1]) - self._starts[index]
            if last > first:
                size = self.itemsize
                pieces.append(self.tensors[index][first // size : last // size])
            index += 1
        return pieces

    def views(self, start: int, stop: int) -> list[memoryview]:
        """Return bytes [start, stop) of a message on the host as memory views."""
        return [memory(tensor) for tensor in self.cut(start, stop)]

    def gather(self, start: int, stop: int, into: Tensor, *, waiting: bool = True) -> None:
        """Copy bytes [start, stop) of the message to the front of a byte tensor."""
        at = 0
        for piece in self.cut(start, stop):
            size = piece.numel() * self.itemsize
            into[at : at + size].copy_(as_bytes(piece), non_blocking=not waiting)
            at += size

    def scatter(self, start: int, stop: int, source: Tensor, *, waiting: bool = True) -> None:
        """Copy a byte tensor to bytes [start, stop) of the message."""
        at = 0
        for piece in self.cut(start, stop):
            size = piece.numel() * self.itemsize
            as_bytes(piece).copy_(source[at : at + size], non_blocking=not waiting)
            at += size
