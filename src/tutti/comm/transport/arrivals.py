"""Arrivals: frames counted as they come on one connection, and the sender told from time to time.

A sender keeps what was not confirmed. So it hears of every so many bytes, and a moment after the
last of them: no buffer stays taken because nothing follows.
"""

from __future__ import annotations

from collections.abc import Callable

from tutti.comm.reactor import Reactor

_LATER_S = 0.05
_MOST_FRAMES = 256
_PART = 16  # of what a sender keeps, confirmed at once


class Arrivals:
    """What came on one numbered connection."""

    def __init__(self, reactor: Reactor, resend_bytes: int, tell: Callable[[int], None]) -> None:
        """`tell` is called with the number of frames that have come."""
        self._reactor = reactor
        self._every_bytes = resend_bytes // _PART
        self._tell = tell
        self._told = 0
        self._bytes = 0  # not confirmed
        self._waiting = False
        self._open = True
        self.count = 0

    def note(self, num_bytes: int) -> None:
        """Count a frame."""
        self.count += 1
        self._bytes += num_bytes
        if self._bytes >= self._every_bytes or self.count - self._told >= _MOST_FRAMES:
            self._confirm()
        elif not self._waiting:
            self._waiting = True
            self._reactor.after(_LATER_S, self._late)

    def _late(self) -> None:
        self._waiting = False
        if self._open and self.count > self._told:
            self._confirm()

    def _confirm(self) -> None:
        self._told, self._bytes = self.count, 0
        self._tell(self.count)

    def close(self) -> int:
        """Confirm no more; return what had come."""
        self._open = False
        return self.count
