"""Connection: frames on one non-blocking stream socket.

Sending takes memory views as they are (`sendmsg`), receiving asks its owner where a payload goes
and reads straight into it (`recvmsg_into`): no copy of ours on either side, and the interpreter's
lock is free while the kernel copies. A connection that this side opened begins with its handshake.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tutti.comm import frames
from tutti.comm.entry.trust import REPLY_BYTES, Caller, StrangerError
from tutti.comm.frames import HEADER_BYTES, Frame
from tutti.comm.reactor import Reactor

_VIEWS = 64  # per call; the kernel takes 1024 at most
_TURN_BYTES = 8 << 20  # moved before other sockets get their turn
_AT_ONCE = struct.pack("ii", 1, 0)  # of SO_LINGER: what is under way is thrown away


@dataclass(slots=True)
class Outgoing:
    """Views to send, and what to do once the kernel has them."""

    views: list[memoryview]
    done: Callable[[], None] | None = None


@dataclass(slots=True)
class Handler:
    """What a connection asks of its owner."""

    room: Callable[[Frame], list[memoryview]]  # where the payload goes
    arrived: Callable[[Frame], None]  # it is there
    closed: Callable[[str], None]  # the other end is gone, and how
    refill: Callable[[], Outgoing | None] = lambda: None  # what to send next
    trusted: Callable[[], None] = lambda: None  # both sides have proven themselves


class Connection:
    """A socket, what waits to be sent on it, and the frame that is being read."""

    def __init__(
        self,
        reactor: Reactor,
        sock: socket.socket,
        handler: Handler,
        *,
        connecting: bool = False,
        caller: Caller | None = None,
    ) -> None:
        """`caller` greets the other side; without it, the other side has proven itself before."""
        self._reactor = reactor
        self._socket = sock
        self._handler = handler
        self._queue: deque[Outgoing] = deque()
        self._current: Outgoing | None = None
        self._frame: Frame | None = None
        self._header = bytearray(HEADER_BYTES)
        self._room: list[memoryview] = [memoryview(self._header)]
        self._writing = False
        self._blocked = connecting
        self._connecting = connecting
        self._caller = caller  # until both sides are trusted
        if caller is not None:
            self._reply = bytearray(REPLY_BYTES)
            self._room = [memoryview(self._reply)]
            self._current = Outgoing([memoryview(caller.hello)])
        self.open = True
        self.refused = False  # nobody of this job listens there
        self._watch()
        if caller is not None:
            self.kick()

    def _watch(self) -> None:
        if self.open:
            write = self._on_writable if self._blocked else None
            self._reactor.watch(self._socket, self._on_readable, write)

    # --- sending ---------------------------------------------------------------------------

    def send(self, views: list[memoryview], done: Callable[[], None] | None = None) -> None:
        """Send views after what already waits."""
        self._queue.append(Outgoing(views, done))
        self.kick()

    def kick(self) -> None:
        """Send what there is, if the socket takes it."""
        if self.open and not self._blocked and not self._writing:
            self._write()

    def _on_writable(self) -> None:
        if self._connecting:
            error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                self._unreachable(error)
                return
            self._connecting = False
        self._blocked = False
        self._write()
        self._watch()

    def _unreachable(self, error: int) -> None:
        self.refused = error == errno.ECONNREFUSED
        self.close(f"cannot be reached ({os.strerror(error)})")

    def _write(self) -> None:
        self._writing = True
        left = _TURN_BYTES
        try:
            while self.open and self._next():
                assert self._current is not None
                sent = self._socket.sendmsg(self._current.views[:_VIEWS])
                left -= sent
                self._advance(sent)
                if left <= 0:
                    self._block()
                    return
        except BlockingIOError:
            self._block()
        except OSError as error:
            self._blocked = True
            self._on_readable()  # the other side is gone; what it said last is still here
            self.close(_text(error))
        finally:
            self._writing = False

    def _block(self) -> None:
        self._blocked = True
        self._watch()

    def _next(self) -> bool:
        if self._current is None and self._caller is None:
            self._current = self._queue.popleft() if self._queue else self._handler.refill()
        return self._current is not None

    def _advance(self, sent: int) -> None:
        current = self._current
        assert current is not None
        _consume(current.views, sent)
        if not current.views:
            self._current = None
            if current.done is not None:
                current.done()

    # --- receiving -------------------------------------------------------------------------

    def _on_readable(self) -> None:
        left = _TURN_BYTES
        try:
            while self.open and left > 0:
                if not self._room:
                    self._filled()
                    continue
                received = self._socket.recvmsg_into(self._room[:_VIEWS])[0]
                if not received:
                    self.close("closed the connection")
                    return
                left -= received
                _consume(self._room, received)
                if not self._room:
                    self._filled()
        except BlockingIOError:
            return
        except OSError as error:
            if self._connecting:  # what it comes to is told to readers, too
                self._unreachable(error.errno or 0)
            else:
                self.close(_text(error))

    def _filled(self) -> None:
        """Go on after a whole header, or a whole payload."""
        if self._caller is not None:
            self._prove(self._caller)
            return
        if self._frame is None:
            try:
                frame = self._frame = frames.unpack(self._header)
                self._room = self._handler.room(frame) if frame.payload_bytes else []
            except ValueError as error:
                self.close(f"sent what is no frame ({error})")
                return
        if not self._room:
            frame, self._frame = self._frame, None
            self._room = [memoryview(self._header)]
            self._handler.arrived(frame)

    # --- the handshake ---------------------------------------------------------------------

    def _prove(self, caller: Caller) -> None:
        """Answer the other side's proof with ours."""
        try:
            proof = caller.answer(bytes(self._reply))
        except StrangerError as error:
            self.refused = True
            self.close(f"is not where it says: its port {error}")
            return
        self._room = [memoryview(self._header)]
        self._current = Outgoing([memoryview(proof)], self._trust)
        self.kick()

    def _trust(self) -> None:
        self._caller = None
        self._handler.trusted()

    # --- ending ----------------------------------------------------------------------------

    @property
    def is_connected(self) -> bool:
        """Whether the other side's host took the connection, be it open or closed by now."""
        return not self._connecting

    @property
    def unfinished(self) -> Frame | None:
        """The frame whose payload has not all come."""
        return self._frame

    def abort(self) -> None:
        """Close the socket without a word to the owner, and forget what the kernel still holds."""
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        self.close()

    def close(self, reason: str = "") -> None:
        """Close the socket; a reason is told to the owner."""
        if not self.open:
            return
        self.open = False
        self._reactor.watch(self._socket, None, None)
        with contextlib.suppress(OSError):
            self._socket.close()
        if reason:
            self._handler.closed(reason)

    def flush(self, seconds: float) -> None:
        """Send what waits, blocking, before the end."""
        if not self.open or self._connecting:
            return
        with contextlib.suppress(OSError, StrangerError):
            self._socket.settimeout(seconds)
            if self._caller is not None:
                self._prove_now(self._caller)
            while self._current is not None or self._queue:
                for view in (self._current or self._queue.popleft()).views:
                    self._socket.sendall(view)
                self._current = None

    def _prove_now(self, caller: Caller) -> None:
        """Finish the handshake, blocking."""
        for view in self._current.views if self._current is not None else ():
            self._socket.sendall(view)
        if self._room and self._room[0].obj is self._reply:
            while self._room:
                received = self._socket.recv_into(self._room[0])
                if not received:
                    raise ConnectionResetError
                _consume(self._room, received)
            self._socket.sendall(caller.answer(bytes(self._reply)))
        self._current = None
        self._trust()


def _consume(views: list[memoryview], count: int) -> None:
    """Drop the first `count` bytes."""
    done = 0
    for view in views:
        if count < view.nbytes:
            break
        count -= view.nbytes
        done += 1
    del views[:done]
    if count:
        views[0] = views[0][count:]


def _text(error: OSError) -> str:
    return f"broke the connection ({error.strerror or error})"
