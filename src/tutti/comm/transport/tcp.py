"""tcp: several connections to one rank, each bound to an address of ours and one of theirs.

Pieces of a message go to whichever connection is free to take one, so unequal NICs share it in
proportion. What a broken connection held goes out again over another one (`lanes`). Device tensors
pass through pinned buffers, a few at a time, so that copies and the network overlap.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import socket
from collections import deque

from torch import Tensor

from tutti.comm.frames import Kind, Tag
from tutti.comm.places import Place
from tutti.comm.spans import Spans, memory
from tutti.comm.transport.connection import Outgoing
from tutti.comm.transport.lane import Carried, Lane
from tutti.comm.transport.lanes import Ends, Lanes
from tutti.comm.transport.link import LinkOwner, Message, Priority, Then, priority
from tutti.comm.transport.sent_log import Sent, nothing
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
    name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return name.partition(b"\0")[0].decode()


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
        self._messages: list[tuple[Priority, Message]] = []
        self._ready: deque[tuple[Message, int, int, Tensor]] = deque()
        self._staged = 0
        self._numbers = itertools.count()
        # What the kernel holds cannot be overtaken any more: no more than keeps the wire busy.
        rate = home.bandwidth or _LIKELY_RATE
        self._unsent = int(min(max(rate * _AHEAD_S, _LEAST_AHEAD), _MOST_AHEAD))
        self._lanes = Lanes(
            owner, peer, Ends(home.addresses, away.addresses, away.port), self._socket, self._next
        )

    def _socket(self, family: socket.AddressFamily) -> socket.socket:
        sock = socket.socket(family, socket.SOCK_STREAM)
        tune(sock, self._owner.settings.congestion)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, self._unsent)
        return sock

    @property
    def is_mending(self) -> bool:
        """Whether something of a lost connection has yet to come."""
        return self._lanes.is_mending

    @property
    def carried(self) -> Carried:
        """What the way to this rank has carried."""
        return self._lanes.carried

    def send(self, tag: Tag, spans: Spans, done: Then, connections: int) -> None:
        """Send a message in pieces over its connections."""
        message = Message(tag, spans, done, connections)
        heapq.heappush(self._messages, (priority(tag, next(self._numbers)), message))
        self._stage()
        self._lanes.kick()

    def _next(self, lane: Lane, place: int) -> Outgoing | None:
        """Return the next piece for a connection, the `place`-th of those that work."""
        if self._ready:
            return self._next_staged(lane)
        if not self._messages or not self._messages[0][1].spans.on_host:
            return None
        message = self._messages[0][1]
        if place >= message.connections:
            return None
        start, stop = message.fragment(self._owner.settings.piece_bytes(message.spans))
        if message.started_all:
            heapq.heappop(self._messages)
            self._stage()
        header = memoryview(message.frame(Kind.DATA, start, stop).pack())
        length = stop - start

        def done() -> None:
            message.sent(length)

        if not self._lanes.keeps:
            return Outgoing([header, *message.spans.views(start, stop)], done)
        if not length:
            return lane.carry(Sent((header,), 0, nothing, done))
        slot = self._owner.buffers.take(length)
        message.spans.gather(start, stop, slot)
        views = (header, memory(slot[:length]))
        return lane.carry(Sent(views, length, lambda: self._owner.buffers.give(slot), done))

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
                self._lanes.kick()

            owner.mover(message.spans).fetch(
                message.spans, start, stop, slot[: stop - start], fetched
            )

    def _next_staged(self, lane: Lane) -> Outgoing:
        message, start, stop, slot = self._ready.popleft()
        header = memoryview(message.frame(Kind.DATA, start, stop).pack())
        views = (header, memory(slot[: stop - start]))

        def release() -> None:
            self._owner.buffers.give(slot)

        def taken() -> None:
            self._staged -= 1
            self._stage()
            message.sent(stop - start)

        def done() -> None:
            release()
            taken()

        if self._lanes.keeps:
            return lane.carry(Sent(views, stop - start, release, taken))
        return Outgoing(list(views), done)

    # --- control ---------------------------------------------------------------------------

    def control(self, views: list[memoryview]) -> None:
        """Send a control frame."""
        self._lanes.control(views)

    def flush(self, seconds: float) -> None:
        """Send what waits on the first connection."""
        self._lanes.flush(seconds)

    def close(self) -> None:
        """Close all connections."""
        self._lanes.close()
