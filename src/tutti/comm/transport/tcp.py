"""tcp: several connections to one rank, each bound to an address of ours and one of theirs.

Pieces of a message go to whichever connection is free to take one, so unequal NICs share it in
proportion. Host tensors are sent from where they lie; device tensors pass through pinned buffers, a
few at a time, so that copies and the network overlap.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import itertools
import socket
from collections import deque

from torch import Tensor

from tutti.comm.frames import Kind, Tag
from tutti.comm.places import Place
from tutti.comm.spans import Spans, memory
from tutti.comm.transport.connection import Connection, Handler, Outgoing
from tutti.comm.transport.link import LinkOwner, Message, Priority, Replies, Then, priority
from tutti.errors import InputError

KERNEL = "kernel"  # the congestion control that the kernel gives every socket
_STEADY = ("cubic", "reno")  # fill a link and keep it full; the second is for everybody
_KEEP_ALIVE_S = 15
_AHEAD_S, _LEAST_AHEAD, _MOST_AHEAD = 2e-3, 65536, 4 << 20  # given to the kernel ahead of time
_LIKELY_RATE = 1.25e9  # bytes per second of a NIC of which nothing is known


def tune(sock: socket.socket, congestion: str = "") -> None:
    """Set what every tcp connection of ours has: no delay, and signs of life."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", _KEEP_ALIVE_S), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_CONGESTION"):
        _control(sock, congestion)


def _control(sock: socket.socket, congestion: str) -> None:
    """Choose a socket's congestion control: as told, else the kernel's own, unless that is BBR.

    BBR finds a link's rate by sending steadily; collectives send in bursts, and under it they left
    a fifth of a link idle (`tutti bench comm --bed rails --senders bbr`).
    """
    if congestion == KERNEL:
        return
    wanted = [congestion] if congestion else []
    if not wanted and _congestion(sock).startswith("bbr"):
        wanted = list(_STEADY)
    for name in wanted:
        with contextlib.suppress(OSError):  # not in this kernel, or not for this user
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
            return
    if congestion:
        raise InputError(
            f"congestion '{congestion}': this kernel has it not, or not for this user; see "
            "net.ipv4.tcp_allowed_congestion_control"
        )


def _congestion(sock: socket.socket) -> str:
    found = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return found.partition(b"\0")[0].decode()


def listen(address: str, port: int = 0) -> socket.socket:
    """Return a listening socket."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((address, port))
    sock.listen(1024)
    sock.setblocking(False)
    return sock


class TcpLink:
    """The way to one rank over the network."""

    def __init__(self, owner: LinkOwner, peer: int, home: Place, away: Place) -> None:
        self._owner = owner
        self._peer = peer
        self._messages: list[tuple[Priority, Message]] = []
        self._ready: deque[tuple[Message, int, int, Tensor]] = deque()
        self._staged = 0
        self._numbers = itertools.count()
        # What the kernel holds cannot be overtaken any more: no more than keeps the wire busy.
        rate = home.bandwidth or _LIKELY_RATE
        self._unsent = int(min(max(rate * _AHEAD_S, _LEAST_AHEAD), _MOST_AHEAD))
        number = max(owner.settings.connections, 1)
        self._connections = [
            self._open(index, home.addresses, away.addresses, away.port) for index in range(number)
        ]

    def _open(
        self, index: int, home: tuple[str, ...], away: tuple[str, ...], port: int
    ) -> Connection:
        theirs = away[index % len(away)]
        family = socket.AF_INET6 if ":" in theirs else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        tune(sock, self._owner.settings.congestion)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, self._unsent)
        if home:
            with contextlib.suppress(OSError):  # an address that was declared but is not here
                sock.bind((home[index % len(home)], 0))
        code = sock.connect_ex((theirs, port))
        replies = Replies(self._owner, self._peer)
        handler = Handler(
            room=replies.room,
            arrived=replies.arrived,
            closed=replies.closed,
            refill=lambda: self._next(index),
        )
        return Connection(
            self._owner.reactor,
            sock,
            handler,
            connecting=code == errno.EINPROGRESS,
            caller=self._owner.caller(self._peer),
        )

    def send(self, tag: Tag, spans: Spans, done: Then, connections: int) -> None:
        """Send a message in pieces over its connections."""
        message = Message(tag, spans, done, connections)
        heapq.heappush(self._messages, (priority(tag, next(self._numbers)), message))
        self._stage()
        self._kick()

    def _kick(self) -> None:
        for connection in self._connections:
            connection.kick()

    def _next(self, index: int) -> Outgoing | None:
        """Return the next piece for a connection."""
        if self._ready:
            return self._next_staged()
        if not self._messages or not self._messages[0][1].spans.on_host:
            return None
        message = self._messages[0][1]
        if index >= message.connections:
            return None
        start, stop = message.fragment(self._owner.settings.piece_bytes(message.spans))
        if message.started_all:
            heapq.heappop(self._messages)
            self._stage()
        header = memoryview(message.frame(Kind.DATA, start, stop).pack())
        views = [header, *message.spans.views(start, stop)]
        return Outgoing(views, lambda: message.sent(stop - start))

    # --- through pinned memory -------------------------------------------------------------

    def _stage(self) -> None:
        """Copy pieces of a device message to the host while there are buffers for it."""
        owner = self._owner
        while self._messages and not self._messages[0][1].spans.on_host:
            if self._staged >= owner.settings.in_flight:
                return
            message = self._messages[0][1]
            start, stop = message.fragment(owner.settings.piece_bytes(message.spans))
            if message.started_all:
                heapq.heappop(self._messages)
            self._staged += 1
            slot = owner.buffers.take(stop - start)

            def fetched(
                message: Message = message, start: int = start, stop: int = stop, s: Tensor = slot
            ) -> None:
                self._ready.append((message, start, stop, s))
                self._kick()

            owner.mover(message.spans).fetch(
                message.spans, start, stop, slot[: stop - start], fetched
            )

    def _next_staged(self) -> Outgoing:
        message, start, stop, slot = self._ready.popleft()
        header = memoryview(message.frame(Kind.DATA, start, stop).pack())

        def done() -> None:
            self._owner.buffers.give(slot)
            self._staged -= 1
            self._stage()
            message.sent(stop - start)

        return Outgoing([header, memory(slot[: stop - start])], done)

    # --- control ---------------------------------------------------------------------------

    def control(self, views: list[memoryview]) -> None:
        """Send a control frame on the first connection."""
        self._connections[0].send(views)

    def flush(self, seconds: float) -> None:
        """Send what waits on the first connection."""
        self._connections[0].flush(seconds)

    def close(self) -> None:
        """Close all connections."""
        for connection in self._connections:
            connection.close()
