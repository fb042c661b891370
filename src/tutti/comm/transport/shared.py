"""shared: a ring of shared memory from one process of a host to another.

The memory has no name: it is created anonymously and handed over through a local socket, so nothing
is left behind whoever is killed; it changes hands once both ends have proven who they are. The
socket carries the headers, and tells at once when the other end dies. The receiver adds or copies
straight out of the ring; where the device can, the ring is pinned, and the device copies into it
and out of it without another stop.
"""

from __future__ import annotations

import heapq
import itertools
import mmap
import os
import socket

import torch
from torch import Tensor

from tutti.comm.frames import Frame, Kind, Tag
from tutti.comm.inbox import Inbox
from tutti.comm.places import Place
from tutti.comm.spans import Spans
from tutti.comm.transport.connection import Connection, Handler, Outgoing
from tutti.comm.transport.link import LinkOwner, Message, Priority, Replies, Then, priority

_ALIGNMENT = 256
PIECES = 4  # at least, in a ring: while half of it is waited for, the other half goes on


def listen(name: str) -> socket.socket:
    """Return a listening local socket; it lives in no folder."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind("\0" + name)
    sock.listen(1024)
    sock.setblocking(False)
    return sock


def receive_memory(sock: socket.socket) -> mmap.mmap:
    """Return the memory that the sender hands over when both ends trust each other."""
    _, descriptors, _, _ = socket.recv_fds(sock, 1, 1)
    descriptor = descriptors[0]
    try:
        return mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


class RingPlaces:
    """Which bytes of a ring are in use.

    Places are numbered without end. Pieces come free in any order: one that the device still reads
    must not lose its place because a later one, for the host, is done.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._head = self._tail = 0  # bytes ever taken, and those before which all are free
        self._used: dict[int, int] = {}  # first → behind the last, in order
        self._freed: set[int] = set()

    def take(self, length: int) -> int | None:
        """Return a place for a piece that does not wrap around; None: the ring is full."""
        need = -(-length // _ALIGNMENT) * _ALIGNMENT
        place = self._head
        if place % self._size + need > self._size:
            place += self._size - place % self._size
        if place + need - self._tail > self._size:
            return None
        self._head = self._used[place] = place + need
        return place

    def free(self, place: int) -> None:
        """Give a place back."""
        self._freed.add(place)
        while self._used and (first := next(iter(self._used))) in self._freed:
            self._freed.remove(first)
            self._tail = self._used.pop(first)


class _Memory:
    """The mapped memory of a ring, pinned once a device first uses it."""

    def __init__(self, memory: mmap.mmap, owner: LinkOwner) -> None:
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._owner = owner
        self._tried = self._pinned = False

    def pin(self) -> None:
        """Pin it, the first time."""
        if not self._tried:
            self._tried = True
            self._pinned = self._owner.pin(self.bytes)

    def unpin(self) -> None:
        """Undo it, at the end."""
        if self._pinned:
            self._pinned = False
            self._owner.unpin(self.bytes)


class SharedLink:
    """The way to a process of the same host."""

    def __init__(self, owner: LinkOwner, peer: int, home: Place, away: Place) -> None:
        del home
        self._owner = owner
        settings = owner.settings
        self._size = (
            settings.ring_bytes if owner.accelerator is None else settings.device_ring_bytes
        )
        self._places = RingPlaces(self._size)
        self._messages: list[tuple[Priority, Message]] = []
        self._numbers = itertools.count()
        self._descriptor = os.memfd_create(f"tutti-{owner.rank}-{peer}")
        os.ftruncate(self._descriptor, self._size)
        self._memory = _Memory(mmap.mmap(self._descriptor, self._size), owner)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect("\0" + away.local_name)
        except OSError:
            self._forget_descriptor()
            raise
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
                trusted=lambda: self._hand_over(sock),
            ),
            caller=owner.caller(peer),
        )

    def _hand_over(self, sock: socket.socket) -> None:
        """Give the memory to the other end, which has proven who it is."""
        socket.send_fds(sock, [b"m"], [self._descriptor])
        self._forget_descriptor()

    def _forget_descriptor(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

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
            piece = min(self._owner.settings.piece_bytes(spans), self._size // PIECES)
            place = self._places.take(min(piece, spans.num_bytes - message.offset))
            if place is None:
                return None
            start, stop = message.fragment(piece)
            if message.started_all:
                heapq.heappop(self._messages)
            header = memoryview(message.frame(Kind.SHARED, start, stop, place).pack())
            at = place % self._size
            slot = self._memory.bytes[at : at + stop - start]
            if spans.on_host:
                spans.gather(start, stop, slot)
                return Outgoing([header], lambda m=message, n=stop - start: m.sent(n))  # type: ignore[misc]
            self._fetch(message, start, stop, slot, header)
        return None

    def _fetch(
        self, message: Message, start: int, stop: int, slot: Tensor, header: memoryview
    ) -> None:
        self._memory.pin()

        def fetched() -> None:
            self._connection.send([header], lambda: message.sent(stop - start))

        self._owner.mover(message.spans).fetch(message.spans, start, stop, slot, fetched)

    def _arrived(self, frame: Frame) -> None:
        if frame.kind is Kind.FREE:
            self._places.free(frame.place)
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
        self._forget_descriptor()
        self._memory.unpin()


class SharedReader:
    """The receiving end of a ring."""

    def __init__(self, memory: mmap.mmap, owner: LinkOwner) -> None:
        self._memory = _Memory(memory, owner)

    def arrived(self, frame: Frame, connection: Connection, inbox: Inbox) -> None:
        """Take a piece out, and tell the sender once its place is free."""
        self._memory.pin()
        at = frame.place % self._memory.bytes.numel()

        def free() -> None:
            connection.send([memoryview(Frame(Kind.FREE, place=frame.place).pack())])

        # What nobody asked for may stay until the sender could miss its place.
        inbox.spill(frame.place + frame.length - self._memory.bytes.numel() // 2)
        inbox.take(frame, self._memory.bytes[at : at + frame.length], free)

    def close(self) -> None:
        """Let go of the memory."""
        self._memory.unpin()
