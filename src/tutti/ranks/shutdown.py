"""How a rank ends: after the step at hand when it is asked to, and soon after an error.

Leaving closes connections, waits for a save under way, and lets torch clean up: each may wait for
a rank that is gone. Nobody needs that of a rank that failed: it tells the cause first, and then has
few seconds left.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Self

LEAVING_S = 8.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def asking(ask: Callable[[int], None]) -> Iterator[None]:
    """Let SIGTERM and Ctrl-C ask, by their numbers, rather than end the process."""

    def hear(number: int, frame: FrameType | None) -> None:
        del frame
        ask(number)

    before = {number: signal.signal(number, hear) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Leaving:
    """The way out of a rank; to be entered first, so that it is left last."""

    def __init__(
        self,
        rank: int,
        failed: Callable[[BaseException], None],
        *,
        end: Callable[[int], None] = os._exit,
        after_s: float = LEAVING_S,
    ) -> None:
        self._rank, self._failed, self._end, self._after_s = rank, failed, end, after_s
        self._timer: threading.Timer | None = None

    def tell(self, error: BaseException) -> None:
        """Tell an error, before anything is closed for it; from now on the process ends soon."""
        self._failed(error)
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:  # there is no step to finish any more
                signal.signal(number, signal.SIG_DFL)
        self._timer = threading.Timer(self._after_s, self._over, [error])
        self._timer.daemon = True
        self._timer.start()

    def _over(self, error: BaseException) -> None:
        said = str(error).strip().splitlines() or [type(error).__name__]
        sys.stderr.write(f"rank {self._rank}: {said[0]}; it hung on its way out and was ended\n")
        sys.stderr.flush()
        self._end(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
