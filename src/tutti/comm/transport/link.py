"""Links: the way out to one rank and the way in from one rank.

A link is simplex: the rank that sends opens it, when it first has something to send, and only small
answers come back on it. So no two ranks ever race to connect, and a rank has as many connections as
it has partners. `OutLink` is what every transport implements; a plug-in (direct RDMA between unlike
chips) adds one with `register_transport`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from tutti.accelerator import Accelerator
from tutti.comm import frames
from tutti.comm.entry.trust import Caller, Key
from tutti.comm.frames import Frame, Kind, Tag
from tutti.comm.inbox import Inbox
from tutti.comm.move import Buffers, DeviceMover, Mover
from tutti.comm.places import Place
from tutti.comm.reactor import Reactor
from tutti.comm.spans import Spans
from tutti.errors import InputError, hint

Then = Callable[[], None]
_EVEN = 4096  # bytes to which pieces are rounded


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What all links of a rank have in common; equal on all ranks."""

    fragment_bytes: int = 1 << 20  # a message travels in pieces of this size
    ring_bytes: int = 8 << 20  # shared memory from one rank to another
    # A device's piece costs about 0.2 ms of the processor's time, and copies run at tens of GB/s.
    device_fragment_bytes: int = 8 << 20  # the largest piece of a device's message
    device_ring_bytes: int = 32 << 20  # shared memory where a rank has a device
    inline_bytes: int = 8 << 10  # smaller messages do not go through shared memory
    connections: int = 1  # per pair of ranks that share no memory
    in_flight: int = 4  # pieces between device and network, per link
    # Sent over the network and not confirmed, per link: kept, to be sent again when a connection
    # breaks. 0: nothing is kept, and a broken connection ends the job.
    resend_bytes: int = 32 << 20
    congestion: str = ""  # TCP's control: a name, "kernel", or empty: the kernel's unless it is BBR

    def piece_bytes(self, spans: Spans) -> int:
        """Return the size of a message's pieces: of a device's, few enough and yet a pipeline."""
        if spans.on_host:
            return self.fragment_bytes
        quarter = -(-spans.num_bytes // (4 * _EVEN)) * _EVEN
        return min(self.device_fragment_bytes, max(quarter, self.device_fragment_bytes // 4))


@dataclass(slots=True, kw_only=True)
class LinkOwner:
    """What a link asks of the mesh that opened it."""

    rank: int
    key: Key  # by which the ranks of this job know each other
    settings: Settings
    reactor: Reactor
    host_mover: Mover
    device_mover: DeviceMover | None
    accelerator: Accelerator | None  # None: tensors lie on the host
    buffers: Buffers
    replied: Callable[[int, Kind, dict[str, Any]], None]  # a control frame came back
    broken: Callable[[int, str], None]  # the link to a rank broke, and how
    lost: bool = False  # everything ended because of another rank, which may have been killed

    def caller(self, peer: int) -> Caller:
        """Return what greets a rank at the begin of a connection to it."""
        return Caller(self.key, self.rank, peer)

    def pin(self, memory: Tensor) -> bool:
        """Pin shared memory for the device; False where there is none, or it cannot be."""
        return self.accelerator is not None and self.accelerator.pin(memory)

    def unpin(self, memory: Tensor) -> None:
        """Undo it, once no copy is under way."""
        if self.accelerator is not None and self.device_mover is not None:
            self.device_mover.drain()
            if self.lost:
                self.accelerator.unpin_later(memory)
            else:
                self.accelerator.unpin(memory)

    def mover(self, spans: Spans) -> Mover:
        """Return the mover for a message."""
        if spans.on_host:
            return self.host_mover
        if self.device_mover is None:
            raise InputError("a device tensor was given to a communicator without a device")
        return self.device_mover


class OutLink(Protocol):
    """The way to one rank."""

    def send(self, tag: Tag, spans: Spans, done: Then, connections: int) -> None:
        """Send a message; `done` says that its memory may be written again."""

    def control(self, views: list[memoryview]) -> None:
        """Send a control frame."""

    def flush(self, seconds: float) -> None:
        """Send what waits, blocking, before the end."""

    def close(self) -> None:
        """Close everything."""


class Opens(Protocol):
    """A transport: opens links."""

    def __call__(self, owner: LinkOwner, peer: int, home: Place, away: Place) -> OutLink:
        """Return the link from this rank's place to a peer's."""


_plug_ins: dict[str, Opens] = {}


def register_transport(name: str, opens: Opens) -> None:
    """Make a transport known; a rank's `Place.transports` says where it can be used."""
    _plug_ins[name] = opens


def unregister_transport(name: str) -> None:
    """Forget a transport."""
    _plug_ins.pop(name, None)


def plug_in(name: str) -> Opens:
    """Return a transport that was registered."""
    if name not in _plug_ins:
        raise InputError(f"transport '{name}': not registered here; {hint(name, _plug_ins)}")
    return _plug_ins[name]


class Message:
    """A message on its way out."""

    __slots__ = ("connections", "done", "offset", "spans", "tag", "unsent")

    def __init__(self, tag: Tag, spans: Spans, done: Then, connections: int) -> None:
        self.tag = tag
        self.spans = spans
        self.done = done
        self.connections = connections
        self.offset = 0
        self.unsent = spans.num_bytes

    def fragment(self, size: int) -> tuple[int, int]:
        """Return the next piece, and go on behind it."""
        start = self.offset
        self.offset = min(start + size, self.spans.num_bytes)
        return start, self.offset

    @property
    def started_all(self) -> bool:
        """Whether every piece was begun."""
        return self.offset >= self.spans.num_bytes

    def frame(self, kind: Kind, start: int, stop: int, place: int = 0) -> Frame:
        """Return the header of a piece."""
        return Frame(kind, self.tag, self.spans.num_bytes, start, stop - start, place)

    def sent(self, length: int) -> None:
        """Note that a piece was read and its memory is free."""
        self.unsent -= length
        if not self.unsent:
            self.done()


Priority = tuple[int, ...]
_COUNT = 0xFFFFFFFF  # of a sequence: above it is the hash of a channel, which says nothing of age


def priority(tag: Tag, number: int) -> Priority:
    """Return what goes first: earlier operations, then earlier chunks, so that chunks overlap."""
    return (tag.sequence & _COUNT, tag.chunk, number)


class Replies:
    """Reads the small frames that come back on a link."""

    def __init__(self, owner: LinkOwner, peer: int) -> None:
        self._owner = owner
        self._peer = peer
        self._payload = bytearray()

    def room(self, frame: Frame) -> list[memoryview]:
        """Return where a control payload goes."""
        if frame.length > frames.MOST_CONTROL_BYTES:
            raise ValueError(f"an answer of {frame.length} bytes")
        self._payload = bytearray(frame.length)
        return [memoryview(self._payload)]

    def read(self, frame: Frame) -> dict[str, Any]:
        """Return what an answer says."""
        return frames.read(self._payload if frame.length else b"")

    def arrived(self, frame: Frame) -> None:
        """Hand an answer on."""
        self._owner.replied(self._peer, frame.kind, self.read(frame))

    def closed(self, reason: str) -> None:
        """Say that the link broke."""
        self._owner.broken(self._peer, reason)


def receive_control(frame: Frame) -> bool:
    """Tell whether a frame is for the mesh, not for an inbox."""
    return frame.kind not in (Kind.DATA, Kind.SHARED)


__all__ = [
    "Inbox",
    "LinkOwner",
    "Message",
    "Opens",
    "OutLink",
    "Replies",
    "Settings",
    "plug_in",
    "receive_control",
    "register_transport",
    "unregister_transport",
]
