"""Host copies of what is saved, taken between two steps; the memory is used again by the next save.

Fresh memory would cost as much time as the copy. One save is under way at most, so one set of
buffers is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from tutti.accelerator.accelerator import Accelerator
from tutti.train.checkpoint.contents import Piece


class Staging:
    """The buffers of one rank."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def copies(self, accelerator: Accelerator, pieces: Sequence[Piece]) -> list[Piece]:
        """Return the pieces with their numbers copied to the host."""
        copies = []
        for piece in pieces:
            key = (piece.key, piece.rectangle.offsets)
            shape, dtype = tuple(piece.memory.shape), piece.memory.dtype
            buffer = self._buffers.get(key)
            if buffer is None or tuple(buffer.shape) != shape or buffer.dtype != dtype:
                buffer = self._buffers[key] = accelerator.pinned(shape, dtype)
            accelerator.to_host(piece.memory.detach(), into=buffer)
            copies.append(replace(piece, memory=buffer))
        accelerator.synchronize()
        return copies

    def release(self) -> None:
        """Give the memory back."""
        self._buffers.clear()
