"""Lane: one connection of a link, what it carried, and whether its path still answers.

The kernel sends again what is not acknowledged, for many minutes; a path that ends in a black hole
looks like a slow one. What tells is that two time-outs in a row brought no word at all. A process
that stands still is no such case: its kernel goes on acknowledging.
"""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple

from tutti.comm.entry.trust import Caller
from tutti.comm.frames import Frame, Kind
from tutti.comm.reactor import Reactor
from tutti.comm.transport.connection import Connection, Handler, Outgoing
from tutti.comm.transport.sent_log import Sent, SentLog, nothing

_SYN_SENT = 2  # tcpi_state
_LEAST_SILENCE_MS = 500
# state, ca_state, retransmits, five bytes; rto … unacked at 24; … last_ack_recv at 56
_TCP_INFO = struct.Struct("=BBB5x16xI28xI")
# bytes_acked at 120; busy_time, in microseconds, at 168. A slow wire fills the other end's window:
# what the kernel counts as limited by that is the wire's, too.
_CARRIED = struct.Struct("=120xQ40xQ")


class Carried(NamedTuple):
    """What a wire has carried so far: acknowledged bytes, and how long some were on their way."""

    bytes: int
    busy_s: float


_NOTHING = Carried(0, 0.0)


class Lane:
    """A connection with a number, by which the other side counts what came on it."""

    def __init__(
        self,
        reactor: Reactor,
        sock: socket.socket,
        number: int,
        handler: Handler,
        *,
        caller: Caller,
        counted: bool,
    ) -> None:
        """Without `counted` nothing is kept, and the other side is told no number."""
        self.number = number
        self.log = SentLog()
        self.trusted = False
        self._socket = sock
        self._counted = counted
        self._joined = handler.trusted
        handler.trusted = self._trust
        self.connection = Connection(reactor, sock, handler, connecting=True, caller=caller)

    def _trust(self) -> None:
        self.trusted = True
        if self._counted:
            self.connection.send([memoryview(Frame(Kind.OPEN, place=self.number).pack())])
        self._joined()

    def carry(self, sent: Sent) -> Outgoing:
        """Return a frame as the connection takes it, and keep it until it is confirmed."""
        self.log.add(sent)
        return Outgoing(list(sent.views), sent.settle)

    def control(self, views: list[memoryview], *, again: bool = True) -> None:
        """Send a control frame after what waits."""
        if not self._counted:
            self.connection.send(views)
            return
        out = self.carry(Sent(tuple(views), 0, nothing, again=again))
        self.connection.send(out.views, out.done)

    @property
    def carried(self) -> Carried:
        """What the kernel says that this connection has carried; nothing where it does not say."""
        try:
            told = self._told(_CARRIED)
        except OSError:
            return _NOTHING
        return Carried(told[0], told[1] / 1e6) if told else _NOTHING

    @property
    def is_silent(self) -> bool:
        """Whether the path takes bytes and brings no word back."""
        try:
            told = self._told(_TCP_INFO)
        except OSError:
            return True
        if not told:
            return False
        state, _, retransmits, unacked, last_word_ms = told
        if state == _SYN_SENT:
            return bool(retransmits)
        return bool(unacked) and retransmits > 1 and last_word_ms >= _LEAST_SILENCE_MS

    def _told(self, layout: struct.Struct) -> tuple[int, ...]:
        """Return what the kernel says of an open connection, nothing where it does not say."""
        if not hasattr(socket, "TCP_INFO") or not self.connection.open:
            return ()
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, layout.size)
        return layout.unpack(info) if len(info) == layout.size else ()
