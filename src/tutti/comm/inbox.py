"""Inbox: what arrives from one rank, matched by tag with what was asked for.

A message nobody has asked for yet is kept in host memory, so that no order of operations on two
ranks can make them wait for each other for ever; pieces in shared memory stay there as long as the
sender can do without their place. A message that was asked for goes straight to its
place, or, when it is to be added to what is there, is added fragment by fragment as it comes in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from tutti.comm.frames import Frame, Tag
from tutti.comm.move import Buffers, Combine, Mover
from tutti.comm.spans import Spans, memory


class Receive:
    """A message that an operation waits for.

    With `held` it is kept aside once it is complete, and `held` called; it takes effect with
    `apply`: its addition has a place in a fixed order, or its target is still being sent.
    """

    def __init__(
        self,
        *,
        spans: Spans,
        mover: Mover,
        buffers: Buffers,
        done: Callable[[], None],
        moved: Callable[[], None],
        combine: Combine | None = None,
        decode: Callable[[Tensor], Tensor] | None = None,
        num_bytes: int | None = None,
        held: Callable[[], None] | None = None,
    ) -> None:
        self._spans = spans
        self._mover = mover
        self._buffers = buffers
        self._combine = combine
        self._decode = decode
        self.num_bytes = spans.num_bytes if num_bytes is None else num_bytes
        self._done = done
        self._moved = moved
        self._staging: Tensor | None = None
        self._slots: dict[int, Tensor] = {}
        self._arrived = 0
        self._settled = 0
        self._whole = (
            held is not None or decode is not None
        )  # arrives as a whole before it takes effect
        self._held = held
        self._direct = not self._whole and combine is None and spans.on_host

    @property
    def complete(self) -> bool:
        """Whether all bytes are here."""
        return self._arrived == self.num_bytes

    def adopt(self, staging: Tensor, arrived: int) -> None:
        """Go on with a message that came before it was asked for."""
        self._whole, self._direct = True, False
        self._staging, self._arrived = staging, arrived
        self._check_whole()

    def room(self, offset: int, length: int) -> list[memoryview]:
        """Return where the bytes of a fragment go."""
        if self._direct:
            return self._spans.views(offset, offset + length)
        if self._whole:
            return [memory(self._stage()[offset : offset + length])]
        slot = self._slots[offset] = self._buffers.take(length)
        return [memory(slot[:length])]

    def arrived(self, offset: int, length: int) -> None:
        """Note that a fragment is where `room` said."""
        self._arrived += length
        self._moved()
        if self._direct:
            self._settle(length)
        elif self._whole:
            self._check_whole()
        else:
            slot = self._slots.pop(offset)

            def stored() -> None:
                self._buffers.give(slot)
                self._settle(length)

            self._mover.store(self._spans, offset, slot[:length], self._combine, stored)

    def undo(self, offset: int) -> None:
        """Forget a fragment for which there was room and which has not all come."""
        slot = self._slots.pop(offset, None)
        if slot is not None:
            self._buffers.give(slot)

    def take(self, offset: int, source: Tensor, then: Callable[[], None]) -> None:
        """Take a fragment out of shared memory; `then` says that it may be reused."""
        length = source.numel()
        self._arrived += length
        self._moved()
        if self._whole:
            self._stage()[offset : offset + length].copy_(source)
            then()
            self._check_whole()
            return

        def stored() -> None:
            then()
            self._settle(length)

        self._mover.store(self._spans, offset, source, self._combine, stored)

    def apply(self) -> None:
        """Let a whole message take effect."""
        staging = self._stage()

        def stored() -> None:
            self._buffers.give(staging)
            self._settle(self.num_bytes)

        source = staging[: self.num_bytes]
        if self._decode is not None:
            source = self._decode(source)
        self._mover.store(self._spans, 0, source, self._combine, stored)

    def _stage(self) -> Tensor:
        if self._staging is None:
            self._staging = self._buffers.take(self.num_bytes)
        return self._staging

    def _check_whole(self) -> None:
        if not self.complete:
            return
        if self._held is not None:
            self._held()
        else:
            self.apply()

    def _settle(self, length: int) -> None:
        self._settled += length
        if self._settled == self.num_bytes:
            self._done()


@dataclass(slots=True)
class _Early:
    """A message that nobody has asked for yet: its pieces where they came, or put aside."""

    total: int
    buffers: Buffers
    arrived: int = 0
    waiting: list[tuple[Frame, Tensor, Callable[[], None]]] = field(default_factory=list)
    _staging: Tensor | None = None

    @property
    def is_aside(self) -> bool:
        """Whether it has a buffer of its own."""
        return self._staging is not None

    def staging(self) -> Tensor:
        """Return a buffer for the whole message, with all that waits put there."""
        if self._staging is None:
            self._staging = self.buffers.take(self.total)
        for frame, source, then in self.waiting:
            self._staging[frame.offset : frame.offset + frame.length].copy_(source)
            self.arrived += frame.length
            then()
        self.waiting.clear()
        return self._staging


class Inbox:
    """The messages of one rank."""

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._asked: dict[Tag, Receive] = {}
        self._early: dict[Tag, _Early] = {}

    def post(self, tag: Tag, receive: Receive) -> None:
        """Ask for a message."""
        early = self._early.pop(tag, None)
        if early is None:
            self._asked[tag] = receive
            return
        if early.total != receive.num_bytes:
            raise ValueError(
                f"{early.total} bytes came where {receive.num_bytes} are due; do all ranks call it "
                "with the same sizes?"
            )
        if not early.is_aside:
            self._asked[tag] = receive
            for frame, source, then in early.waiting:
                self.take(frame, source, then)
            return
        staging = early.staging()
        if early.arrived < early.total:
            self._asked[tag] = receive
        receive.adopt(staging, early.arrived)

    def room(self, frame: Frame) -> list[memoryview]:
        """Return where the payload of a fragment goes."""
        receive = self._asked.get(frame.tag)
        if receive is not None:
            self._check(receive, frame)
            return receive.room(frame.offset, frame.length)
        staging = self._keep(frame).staging()
        return [memory(staging[frame.offset : frame.offset + frame.length])]

    def arrived(self, frame: Frame) -> None:
        """Note that a fragment's payload is where `room` said."""
        receive = self._asked.get(frame.tag)
        if receive is None:
            self._early[frame.tag].arrived += frame.length
            return
        if receive._arrived + frame.length == receive.num_bytes:
            del self._asked[frame.tag]
        receive.arrived(frame.offset, frame.length)

    def undo(self, frame: Frame) -> None:
        """Forget a fragment of which only a part came; it comes again."""
        receive = self._asked.get(frame.tag)
        if receive is not None:
            receive.undo(frame.offset)

    def take(self, frame: Frame, source: Tensor, then: Callable[[], None]) -> None:
        """Take a fragment out of shared memory."""
        receive = self._asked.get(frame.tag)
        if receive is None:
            early = self._keep(frame)
            early.waiting.append((frame, source, then))
            if early.is_aside:
                early.staging()
            return
        self._check(receive, frame)
        if receive._arrived + frame.length == receive.num_bytes:
            del self._asked[frame.tag]
        receive.take(frame.offset, source, then)

    def _keep(self, frame: Frame) -> _Early:
        early = self._early.get(frame.tag)
        if early is None:
            early = self._early[frame.tag] = _Early(frame.total, self._buffers)
        return early

    def spill(self, place: int) -> None:
        """Put aside what waits in shared memory before a place: the sender needs the room."""
        for early in self._early.values():
            if early.waiting and early.waiting[0][0].place < place:
                early.staging()

    @staticmethod
    def _check(receive: Receive, frame: Frame) -> None:
        if frame.total != receive.num_bytes:
            raise ValueError(
                f"{frame.total} bytes come where {receive.num_bytes} are due; do all ranks call it "
                "with the same sizes?"
            )

    def clear(self) -> None:
        """Forget everything."""
        self._asked.clear()
        self._early.clear()
