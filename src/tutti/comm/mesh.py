"""Mesh: the links of one rank, opened when they are first needed.

At start a rank opens links to a few others only (distances 1, 2, 4, … around the ring of ranks), on
which news of a failure spreads even when ranks are missing; all other links follow the programs.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tutti.comm import frames
from tutti.comm.entry.listener import Door, Strangers
from tutti.comm.entry.trust import Called
from tutti.comm.frames import MOST_CONTROL_BYTES, Frame, Kind
from tutti.comm.inbox import Inbox
from tutti.comm.places import Topology
from tutti.comm.transport.arrivals import Arrivals
from tutti.comm.transport.connection import Connection, Handler
from tutti.comm.transport.lane import Carried
from tutti.comm.transport.link import LinkOwner, Opens, OutLink, plug_in, receive_control
from tutti.comm.transport.shared import SharedLink, SharedReader, receive_memory
from tutti.comm.transport.tcp import TcpLink, tune

_TRANSPORTS: dict[str, Opens] = {"tcp": TcpLink, "shared": SharedLink}


@dataclass(slots=True)
class Listeners:
    """The sockets on which a rank is reached."""

    tcp: socket.socket
    local: socket.socket | None = None

    def close(self) -> None:
        """Close them."""
        self.tcp.close()
        if self.local is not None:
            self.local.close()


@dataclass(slots=True)
class Events:
    """What the mesh tells its executor."""

    control: Callable[[int, Kind, dict[str, Any], Connection], None]
    broken: Callable[[int, str], None]
    failed: Callable[[int, BaseException], None]
    doubted: Callable[[int, str], None]  # a connection in is gone; its sender may open another
    stranger: Callable[[str], None] | None = None  # one was turned away, and who


@dataclass(slots=True)
class _Incoming:
    """A connection that came in, of a rank that has proven itself."""

    peer: int
    payload: bytearray = field(default_factory=bytearray)
    reader: SharedReader | None = None
    connection: Connection | None = None
    number: int = 0  # by which its sender knows it; 0: it has none
    arrivals: Arrivals | None = None  # of a connection with a number


class Mesh:
    """All links of a rank."""

    def __init__(
        self, owner: LinkOwner, topology: Topology, listeners: Listeners, events: Events
    ) -> None:
        self._owner = owner
        self._topology = topology
        self._listeners = listeners
        self._events = events
        self._outs: dict[int, OutLink] = {}
        self._inboxes: dict[int, Inbox] = {}
        self._incoming: list[_Incoming] = []
        self._ended: list[SharedReader] = []  # of connections that ended
        self._left: set[int] = set()
        self._came: dict[tuple[int, int], int] = {}  # frames of connections that ended, by number
        self._doors: list[Door] = []

    def open(self) -> None:
        """Listen, and open the links on which news spreads."""
        listeners = self._listeners
        self._doors = [self._door(listeners.tcp, self._admit)]
        if listeners.local is not None:
            self._doors.append(self._door(listeners.local, self._admit_local))
        for door in self._doors:
            door.open()
        for peer in self.neighbours():
            with contextlib.suppress(OSError):  # it left at once; whoever needs it will be told
                self.out(peer)

    def neighbours(self) -> list[int]:
        """Return the ranks at distance 1, 2, 4, … on both sides."""
        size, rank = self._topology.size, self._owner.rank
        steps = [1 << k for k in range((size - 1).bit_length())]
        neighbours = {(rank + sign * step) % size for step in steps for sign in (1, -1)}
        return sorted(neighbours - {rank})

    def out(self, peer: int) -> OutLink:
        """Return the link to a rank, opened if need be."""
        link = self._outs.get(peer)
        if link is None:
            places = self._topology.places
            home, away = places[self._owner.rank], places[peer]
            kind = self._topology.transport(self._owner.rank, peer)
            opens: Opens = _TRANSPORTS[kind] if kind in _TRANSPORTS else plug_in(kind)
            link = self._outs[peer] = opens(self._owner, peer, home, away)
        return link

    def inbox(self, peer: int) -> Inbox:
        """Return what arrives from a rank."""
        if peer not in self._inboxes:
            self._inboxes[peer] = Inbox(self._owner.buffers)
        return self._inboxes[peer]

    def tell_all(self, kind: Kind, value: dict[str, Any]) -> None:
        """Send a control frame on every open link."""
        for link in list(self._outs.values()):
            link.control(frames.message(kind, value))

    def has_left(self, peer: int) -> bool:
        """Tell whether a rank closed its communicator on purpose."""
        return peer in self._left

    def carried(self) -> dict[int, Carried]:
        """Return what the wires to other hosts have carried so far, by rank."""
        links = list(self._outs.items())
        return {peer: link.carried for peer, link in links if isinstance(link, TcpLink)}

    # --- connections that come in ----------------------------------------------------------

    def _door(self, listener: socket.socket, admit: Callable[[socket.socket, int], None]) -> Door:
        """Return a door through which ranks of this job come, and nobody else."""
        owner, size = self._owner, self._topology.size
        where = f"rank {owner.rank}'s local socket"
        if listener.family != socket.AF_UNIX:
            where = f"rank {owner.rank}'s port {listener.getsockname()[1]}"
        strangers = Strangers(where, self._events.stranger)
        return Door(
            owner.reactor, listener, lambda: Called(owner.key, owner.rank, size), admit, strangers
        )

    def _admit(self, sock: socket.socket, peer: int) -> None:
        try:
            tune(sock)
        except OSError:  # it has left already
            sock.close()
            return
        self._greet(sock, _Incoming(peer))

    def _admit_local(self, sock: socket.socket, peer: int) -> None:
        """Wait for the memory that comes first on a local socket."""

        def ready() -> None:
            self._owner.reactor.watch(sock, None, None)
            try:
                memory = receive_memory(sock)
            except (OSError, IndexError, ValueError):
                sock.close()  # it ended before it had sent anything
                return
            self._greet(sock, _Incoming(peer, reader=SharedReader(memory, self._owner)))

        self._owner.reactor.watch(sock, ready, None)

    def _greet(self, sock: socket.socket, incoming: _Incoming) -> None:
        handler = Handler(
            room=lambda frame: self._room(incoming, frame),
            arrived=lambda frame: self._arrived(incoming, frame),
            closed=lambda reason: self._closed(incoming, reason),
        )
        self._incoming.append(incoming)
        incoming.connection = Connection(self._owner.reactor, sock, handler)

    def _room(self, incoming: _Incoming, frame: Frame) -> list[memoryview]:
        if receive_control(frame):
            if frame.length > MOST_CONTROL_BYTES:
                raise ValueError(f"a control frame of {frame.length} bytes")
            incoming.payload = bytearray(frame.length)
            return [memoryview(incoming.payload)]
        try:
            return self.inbox(incoming.peer).room(frame)
        except ValueError as error:
            self._events.failed(incoming.peer, error)
            return [memoryview(bytearray(frame.length))]

    def _arrived(self, incoming: _Incoming, frame: Frame) -> None:
        connection = incoming.connection
        assert connection is not None
        if frame.kind is Kind.OPEN:
            self._number(incoming, connection, frame.place)
            return
        if incoming.arrivals is not None:
            incoming.arrivals.note(frame.length)
        if frame.kind is Kind.DATA:
            self.inbox(incoming.peer).arrived(frame)
        elif frame.kind is Kind.SHARED and incoming.reader is not None:
            self._take_shared(incoming, frame, connection)
        elif frame.kind is Kind.BYE:
            self._left.add(incoming.peer)
        elif frame.kind is Kind.RESUME:
            lost = frames.read(incoming.payload)["lost"]
            came = {str(number): self._end_of(incoming.peer, number) for number in lost}
            connection.send(frames.message(Kind.RESUMED, {"came": came}))
        else:
            value = frames.read(incoming.payload if frame.length else b"")
            self._events.control(incoming.peer, frame.kind, value, connection)

    def _number(self, incoming: _Incoming, connection: Connection, number: int) -> None:
        """Count from here on what comes on a connection, and confirm it.

        One that its sender has given up before its first frame was read here is dropped: what it
        brings comes again.
        """
        if (incoming.peer, number) in self._came:
            connection.abort()
            self._forget(incoming)
            return

        def tell(count: int) -> None:
            connection.send([memoryview(Frame(Kind.CONFIRM, place=count).pack())])

        incoming.number = number
        incoming.arrivals = Arrivals(self._owner.reactor, self._owner.settings.resend_bytes, tell)

    def _end_of(self, peer: int, number: int) -> int:
        """End a connection that its sender has given up; return how many frames came on it."""
        for incoming in self._incoming:
            if (incoming.peer, incoming.number) == (peer, number):
                assert incoming.connection is not None
                incoming.connection.abort()
                self._forget(incoming)
                break
        return self._came.setdefault((peer, number), 0)

    def _forget(self, incoming: _Incoming) -> None:
        """Drop a connection in; what came of a frame that is not whole does not count."""
        if incoming in self._incoming:
            self._incoming.remove(incoming)
        if incoming.reader is not None:
            # pieces that nobody has asked for yet may lie there: they leave it at full speed
            self._ended.append(incoming.reader)
        if incoming.arrivals is None:
            return
        self._came[incoming.peer, incoming.number] = incoming.arrivals.close()
        unfinished = None if incoming.connection is None else incoming.connection.unfinished
        if unfinished is not None and unfinished.kind is Kind.DATA:
            self.inbox(incoming.peer).undo(unfinished)

    def _take_shared(self, incoming: _Incoming, frame: Frame, connection: Connection) -> None:
        assert incoming.reader is not None
        try:
            incoming.reader.arrived(frame, connection, self.inbox(incoming.peer))
        except ValueError as error:
            self._events.failed(incoming.peer, error)

    def _closed(self, incoming: _Incoming, reason: str) -> None:
        self._forget(incoming)
        if incoming.peer in self._left:
            return
        may_come_again = incoming.reader is None and self._owner.settings.resend_bytes > 0
        tell = self._events.doubted if may_come_again else self._events.broken
        tell(incoming.peer, reason)

    # --- the end ---------------------------------------------------------------------------

    @property
    def is_mending(self) -> bool:
        """Whether something has to be sent again."""
        return any(isinstance(link, TcpLink) and link.is_mending for link in self._outs.values())

    def say_goodbye(self) -> None:
        """Tell all that this rank leaves on purpose."""
        for link in self._outs.values():
            link.control(frames.message(Kind.BYE))
            link.flush(0.5)

    def close(self) -> None:
        """Close every connection and listener."""
        for door in self._doors:
            door.close()
        self._listeners.close()
        for link in self._outs.values():
            link.close()
        for incoming in self._incoming:
            if incoming.connection is not None:
                incoming.connection.close()
            if incoming.arrivals is not None:
                incoming.arrivals.close()
            if incoming.reader is not None:
                incoming.reader.close()
        for reader in self._ended:
            reader.close()
        for inbox in self._inboxes.values():
            inbox.clear()
