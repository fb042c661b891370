"""Reactor: one thread that owns sockets, timers and everything that reacts to them.

All state of the executor is touched by its reactor's thread only, so nothing there needs a lock.
Other threads hand in work with `call`. A process has one reactor; with many cores, links may have
reactors of their own, bound to the processors near their NIC.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import selectors
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

Callback = Callable[[], None]


def near_processors(numa: int | None) -> tuple[int, ...]:
    """Return the processors of a NUMA node; none where it is not known."""
    if numa is None:
        return ()
    processors: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        text = Path(f"/sys/devices/system/node/node{numa}/cpulist").read_text(encoding="ascii")
        for part in text.strip().split(","):
            first, _, last = part.partition("-")
            processors += range(int(first), int(last or first) + 1)
    return tuple(processors)


class Timer:
    """A call to come; `cancel` forgets it."""

    __slots__ = ("function",)

    def __init__(self, function: Callback) -> None:
        self.function: Callback | None = function

    def cancel(self) -> None:
        """Do not call."""
        self.function = None


class Reactor:
    """An event loop in a thread of its own."""

    def __init__(self, name: str, *, processors: Iterable[int] = ()) -> None:
        self._selector = selectors.DefaultSelector()
        self._calls: deque[Callback] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()
        self._ears, self._bell = socket.socketpair()
        for end in (self._ears, self._bell):
            end.setblocking(False)
        self._selector.register(self._ears, selectors.EVENT_READ, (self._wake, None))
        self._processors = tuple(processors)
        self._running = True
        self._rung = False
        self.on_failure: Callable[[BaseException], None] = _nothing
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def inside(self) -> bool:
        """Tell whether the caller is the reactor's own thread."""
        return threading.current_thread() is self._thread

    def call(self, function: Callback) -> None:
        """Run a function in the reactor's thread, soon."""
        self._calls.append(function)
        if not self._rung and not self.inside():
            self._rung = True
            with contextlib.suppress(OSError):  # full: it will wake anyway; closed: it is over
                self._bell.send(b"!")

    def after(self, delay_s: float, function: Callback) -> Timer:
        """Run a function in the reactor's thread later; call this from inside."""
        timer = Timer(function)
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._numbers), timer))
        return timer

    def watch(self, sock: socket.socket, read: Callback | None, write: Callback | None) -> None:
        """Call `read` and `write` when the socket is ready for it; None: do not."""
        mask = (selectors.EVENT_READ if read else 0) | (selectors.EVENT_WRITE if write else 0)
        known = sock in self._selector.get_map()
        if mask and known:
            self._selector.modify(sock, mask, (read, write))
        elif mask:
            self._selector.register(sock, mask, (read, write))
        elif known:
            self._selector.unregister(sock)

    def stop(self, wait_s: float = 5.0) -> None:
        """End the thread; what was handed in before is still run."""

        def end() -> None:
            self._running = False

        self.call(end)
        if not self.inside():
            self._thread.join(wait_s)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._ears.recv(4096):
                pass
        self._rung = False  # last: what is handed in from here on rings again

    def _loop(self) -> None:
        if self._processors and sys.platform == "linux":
            with contextlib.suppress(OSError):  # a container may not have them
                os.sched_setaffinity(0, self._processors)
        while self._running:
            try:
                self._turn()
            except Exception as error:
                if not sys.is_finalizing():
                    traceback.print_exc()
                self.on_failure(error)
        with contextlib.suppress(OSError):
            self._selector.close()
            self._ears.close()
            self._bell.close()

    def _turn(self) -> None:
        while self._calls:
            self._calls.popleft()()
        if not self._running:
            return
        ready = self._selector.select(self._patience())
        for key, mask in ready:
            read, write = key.data
            if mask & selectors.EVENT_READ and read is not None:
                read()
            if mask & selectors.EVENT_WRITE and write is not None and _watched(key, self._selector):
                write()
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            function = heapq.heappop(self._timers)[2].function
            if function is not None:
                function()

    def _patience(self) -> float | None:
        if self._calls:
            return 0.0
        if not self._timers:
            return None
        return max(0.0, self._timers[0][0] - time.monotonic())


def _nothing(error: BaseException) -> None:
    del error


def _watched(key: selectors.SelectorKey, selector: selectors.BaseSelector) -> bool:
    """Tell whether a socket is still watched for writing after its `read` ran.

    It may have closed the socket, whose number may belong to another one by now.
    """
    now = selector.get_map().get(key.fd)
    return now is not None and now.fileobj is key.fileobj and now.data[1] is not None
