"""Reports on their way from agents to the collector: lines of JSON over TCP or a Unix socket.

An agent goes on probing where nobody listens; its reports are dropped until somebody does.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tutti.errors import InputError

_AGAIN_S = 1.0
_MOST_LINE = 1 << 20


def _family(at: str) -> tuple[socket.socket, Any]:
    if at.startswith("unix:"):
        return socket.socket(socket.AF_UNIX), at.removeprefix("unix:")
    address, _, port = at.rpartition(":")
    return socket.socket(socket.AF_INET), (address, int(port))


class ReportSender:
    """Sends reports; connects again by itself."""

    def __init__(self, to: str, say: Callable[[str], None] = lambda _: None) -> None:
        self._to, self._say, self._said = to, say, False
        self._socket: socket.socket | None = None
        self._tried = -_AGAIN_S

    def send(self, report: dict[str, Any]) -> None:
        """Send a report, or drop it."""
        line = json.dumps(report, separators=(",", ":")).encode() + b"\n"
        if self._socket is None and not self._connect():
            return
        assert self._socket is not None
        try:
            self._socket.sendall(line)
        except OSError:
            self.close()

    def _connect(self) -> bool:
        if time.monotonic() - self._tried < _AGAIN_S:
            return False
        self._tried = time.monotonic()
        made, where = _family(self._to)
        made.settimeout(0.5)
        try:
            made.connect(where)
        except OSError as error:
            made.close()
            if not self._said:
                self._said = True
                self._say(f"nobody collects at {self._to} ({error.strerror or error}); probing on")
            return False
        self._socket, self._said = made, False
        return True

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class ReportListener:
    """Receives the reports of all agents."""

    def __init__(self, at: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._rest: dict[socket.socket, bytes] = {}
        self._socket, where = _family(at)
        self._path = Path(where) if at.startswith("unix:") else None
        if self._path is None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        else:
            self._path.unlink(missing_ok=True)
        try:
            self._socket.bind(where)
        except OSError as error:
            self._socket.close()
            raise InputError(f"{at}: {os.strerror(error.errno or 0)}") from None
        self._socket.listen(1024)
        self._socket.setblocking(False)
        self._selector.register(self._socket, selectors.EVENT_READ)

    def reports(self, wait_s: float) -> Iterator[dict[str, Any]]:
        """Yield what has come, waiting at most so long for it; lines that are no JSON are left."""
        for key, _ in self._selector.select(wait_s):
            one = key.fileobj
            assert isinstance(one, socket.socket)
            if one is self._socket:
                with contextlib.suppress(OSError):
                    came, _ = one.accept()
                    came.setblocking(False)
                    self._rest[came] = b""
                    self._selector.register(came, selectors.EVENT_READ)
                continue
            yield from self._read(one)

    def _read(self, one: socket.socket) -> Iterator[dict[str, Any]]:
        try:
            data = one.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        *lines, rest = (self._rest[one] + data).split(b"\n")
        if not data or len(rest) > _MOST_LINE:
            self._selector.unregister(one)
            del self._rest[one]
            one.close()
        else:
            self._rest[one] = rest
        for line in lines:
            with contextlib.suppress(ValueError):
                value = json.loads(line)
                if isinstance(value, dict):
                    yield value

    def close(self) -> None:
        """Close everything."""
        for one in (self._socket, *self._rest):
            one.close()
        self._selector.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
