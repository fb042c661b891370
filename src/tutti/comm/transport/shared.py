"""shared: a ring of shared memory from one process of a host to another.

The memory has no name: it is created anonymously and handed over through a local socket, so nothing
is left behind whoever is killed. The socket carries the headers, and tells at once when the other
end dies. The receiver adds or copies straight out of the ring; where the device can, the ring is
pinned, and the device copies into it and out of it without another stop.
"""

from __future__ import annotations

import heapq
import itertools
import mmap
import os
import socket

import torch
from torch import Tensor

from tutti.comm import frames
from tutti.comm.frames import Frame, Kind, Tag
from tutti.comm.inbox import Inbox
from tutti.comm.places import Place
from tutti.comm.spans import Spans
from tutti.comm.transport.connection import Connection, Handler, Outgoing
from tutti.comm.transport.link import LinkOwner, Message, Priority, Replies, Then, priority

_ALIGNMENT = 256


def listen(name: str) -> socket.socket:
    """Return a listening local socket; it lives in no folder."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind("\0" + name)
    sock.listen(1024)
    sock.setblocking(False)
    return sock


def receive_memory(sock: socket.socket) -> mmap.mmap:
    """Return the memory that the sender hands over as the first thing on its socket."""
    _, descriptors, _, _ = socket.recv_fds(sock, 1, 1)
    descriptor = descriptors[0]
    try:
        return mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


class SharedLink:
    """The way to a process of the same host."""

    def __init__(self, owner: LinkOwner, peer: int, home: Place, away: Place) -> None:
        del home
        self._owner = owner
        self._size = owner.settings.ring_bytes
        self._fragment = min(owner.settings.fragment_bytes, self._size // 2)
        self._head = self._tail = 0  # bytes ever put in and ever freed, without end
        self._messages: list[tuple[Priority, Message]] = []
        self._numbers = itertools.count()
        descriptor = os.memfd_create(f"tutti-{owner.rank}-{peer}")
        os.ftruncate(descriptor, self._size)
        self._map = mmap.mmap(descriptor, self._size)
        self._ring = torch.frombuffer(self._map, dtype=torch.uint8)
        self._pinned = False
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect("\0" + away.local_name)
        socket.send_fds(sock, [b"m"], [descriptor])
        os.close(descriptor)
        sock.setblocking(False)
        self._replies = Replies(owner, peer)
        self._connection = Connection(
            owner.reactor,
            sock,
            Handler(
                room=self._replies.room,
                arrived=self._arrived,
                closed=self._replies.closed,
                refill=self._next,
            ),
        )
        hello = {"rank": owner.rank, "session": owner.session, "use": "shared"}
        self._connection.send(frames.message(Kind.HELLO, hello))

    def send(self, tag: Tag, spans: Spans, done: Then, connections: int) -> None:
        """Put a message into the ring, piece by piece, as room becomes free."""
        del connections
        message = Message(tag, spans, done, 1)
        heapq.heappush(self._messages, (priority(tag, next(self._numbers)), message))
        self._connection.kick()

    def _next(self) -> Outgoing | None:
        """Return the next header to send, its bytes being in the ring."""
        while self._messages:
            message = self._messages[0][1]
            spans = message.spans
            if spans.on_host and spans.num_bytes <= self._owner.settings.inline_bytes:
                heapq.heappop(self._messages)
                header = memoryview(message.frame(Kind.DATA, 0, spans.num_bytes).pack())
                views = [header, *spans.views(0, spans.num_bytes)]
                return Outgoing(views, lambda m=message: m.sent(m.spans.num_bytes))  # type: ignore[misc]
            place = self._room(min(self._fragment, spans.num_bytes - message.offset))
            if place is None:
                return None
            start, stop = message.fragment(self._fragment)
            if message.started_all:
                heapq.heappop(self._messages)
            header = memoryview(message.frame(Kind.SHARED, start, stop, place).pack())
            at = place % self._size
            slot = self._ring[at : at + stop - start]
            if spans.on_host:
                spans.gather(start, stop, slot)
                return Outgoing([header], lambda m=message, n=stop - start: m.sent(n))  # type: ignore[misc]
            self._fetch(message, start, stop, slot, header)
        return None

    def _fetch(
        self, message: Message, start: int, stop: int, slot: Tensor, header: memoryview
    ) -> None:
        if not self._pinned:
            self._pinned = True
            self._owner.pin(self._ring)

        def fetched() -> None:
            self._connection.send([header], lambda: message.sent(stop - start))

        self._owner.mover(message.spans).fetch(message.spans, start, stop, slot, fetched)

    def _room(self, length: int) -> int | None:
        """Return a place for a piece that does not wrap around; None: the ring is full."""
        need = -(-length // _ALIGNMENT) * _ALIGNMENT
        place = self._head
        if place % self._size + need > self._size:
            place += self._size - place % self._size
        if place + need - self._tail > self._size:
            return None
        self._head = place + need
        return place

    def _arrived(self, frame: Frame) -> None:
        if frame.kind is Kind.FREE:
            self._tail = frame.place
            self._connection.kick()
        else:
            self._replies.arrived(frame)

    def control(self, views: list[memoryview]) -> None:
        """Send a control frame."""
        self._connection.send(views)

    def flush(self, seconds: float) -> None:
        """Send what waits."""
        self._connection.flush(seconds)

    def close(self) -> None:
        """Close the socket; the memory goes with its last user."""
        self._connection.close()


class SharedReader:
    """The receiving end of a ring."""

    def __init__(self, memory: mmap.mmap, owner: LinkOwner) -> None:
        self._ring = torch.frombuffer(memory, dtype=torch.uint8)
        self._owner = owner
        self._pinned = False

    def arrived(self, frame: Frame, connection: Connection, inbox: Inbox) -> None:
        """Take a piece out, and tell the sender once its place is free."""
        if self._owner.device_mover is not None and not self._pinned:
            self._pinned = True
            self._owner.pin(self._ring)
        at = frame.place % self._ring.numel()
        end = frame.place + -(-frame.length // _ALIGNMENT) * _ALIGNMENT

        def free() -> None:
            connection.send([memoryview(Frame(Kind.FREE, place=end).pack())])

        inbox.take(frame, self._ring[at : at + frame.length], free)
