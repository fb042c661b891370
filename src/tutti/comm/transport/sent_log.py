"""Sent log: what one connection carried and the other side has not confirmed. Pure.

The other side counts the frames of a connection. What it has not counted when the connection is
lost goes out again over another one. So the bytes of a frame stay here, in memory of the link's
own, until they are confirmed: the memory that they came from is free as soon as they are here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


def nothing() -> None:
    """Release no memory: a frame has none of its own."""


@dataclass(slots=True)
class Sent:
    """A frame that was given to a connection."""

    views: tuple[memoryview, ...]
    num_bytes: int
    release: Callable[[], None]  # its memory may be used again
    taken: Callable[[], None] | None = None  # told once: the kernel has it, or never will
    again: bool = True  # whether it is sent again when the connection is lost

    def settle(self) -> None:
        """Tell, once, that its sender need not wait for it."""
        taken, self.taken = self.taken, None
        if taken is not None:
            taken()


class SentLog:
    """The frames of one connection, in order."""

    def __init__(self) -> None:
        self._frames: deque[Sent] = deque()
        self._confirmed = 0
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._frames)

    def add(self, sent: Sent) -> None:
        """Note a frame."""
        self._frames.append(sent)
        self.num_bytes += sent.num_bytes

    def settle(self) -> None:
        """Let nobody wait for what is here."""
        for sent in list(self._frames):
            sent.settle()

    def confirm(self, count: int) -> None:
        """Let go of the first `count` frames that this connection ever carried."""
        if count > self._confirmed + len(self._frames):
            known = self._confirmed + len(self._frames)
            raise ValueError(f"{count} frames are confirmed, {known} were sent")
        while self._confirmed < count:
            sent = self._frames.popleft()
            self._confirmed += 1
            self.num_bytes -= sent.num_bytes
            sent.settle()
            sent.release()

    def rest(self, count: int) -> list[Sent]:
        """Return, of a lost connection, what has to go out again after the first `count` frames."""
        self.confirm(count)
        unread = [sent for sent in self._frames if sent.again]
        self._frames.clear()
        self.num_bytes = 0
        return unread
