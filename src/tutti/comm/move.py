"""Movers: how bytes get from host memory to an operation's tensors and back.

On the host a mover copies and adds at once. For a device it does so on lanes of its own, from and
to pinned memory, and tells when the device is done: a waiting thread turns events into calls of
the reactor, so that copies, the network and computation overlap. Nothing here knows a device.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from tutti.accelerator import Accelerator
from tutti.accelerator.accelerator import Event
from tutti.comm.reactor import Reactor
from tutti.comm.spans import Spans, as_bytes

Combine = Callable[[Tensor, Tensor], object]  # (there, arrived): the second into the first
Then = Callable[[], None]
_ALIGNMENT = 4096
_KEPT, _KEPT_BYTES = 8, 32 << 20  # free buffers of a size: so many, or so many bytes of them


class Buffers:
    """Host buffers that are used again; pinned where the device gains by it."""

    def __init__(self, accelerator: Accelerator | None = None) -> None:
        self._accelerator = accelerator
        self._free: dict[int, list[Tensor]] = defaultdict(list)

    def take(self, num_bytes: int) -> Tensor:
        """Return a buffer of at least so many bytes."""
        size = max(_ALIGNMENT, 1 << (num_bytes - 1).bit_length()) if num_bytes else _ALIGNMENT
        free = self._free[size]
        if free:
            return free.pop()
        if self._accelerator is not None:
            return self._accelerator.pinned((size,), torch.uint8)
        return torch.empty(size, dtype=torch.uint8)

    def give(self, buffer: Tensor) -> None:
        """Give a buffer back."""
        free = self._free[buffer.numel()]
        if len(free) < max(_KEPT, _KEPT_BYTES // buffer.numel()):
            free.append(buffer)


class Mover(Protocol):
    """Moves bytes between host memory and tensors."""

    def outward(self) -> contextlib.AbstractContextManager[None]:
        """Compute inside on the lane by which messages leave."""

    def fetch(self, spans: Spans, start: int, stop: int, into: Tensor, then: Then) -> None:
        """Copy bytes [start, stop) of a message into host memory, then call."""

    def store(
        self, spans: Spans, start: int, source: Tensor, combine: Combine | None, then: Then
    ) -> None:
        """Put host bytes at `start` of a message, or combine them with what is there, then call."""


class HostMover:
    """Tensors on the host."""

    def outward(self) -> contextlib.AbstractContextManager[None]:
        """Compute at once."""
        return contextlib.nullcontext()

    def fetch(self, spans: Spans, start: int, stop: int, into: Tensor, then: Then) -> None:
        """Copy at once."""
        spans.gather(start, stop, into)
        then()

    def store(
        self, spans: Spans, start: int, source: Tensor, combine: Combine | None, then: Then
    ) -> None:
        """Copy or combine at once."""
        if combine is None:
            spans.scatter(start, start + source.numel(), source)
        else:
            _combine(spans, start, source, combine)
        then()


def _combine(spans: Spans, start: int, source: Tensor, combine: Combine) -> None:
    at = 0
    for piece in spans.cut(start, start + source.numel()):
        size = piece.numel() * spans.itemsize
        combine(piece, source[at : at + size].view(piece.dtype))
        at += size


class DeviceMover:
    """Tensors on a device, through pinned host memory, on two lanes of its own."""

    def __init__(self, accelerator: Accelerator, reactor: Reactor) -> None:
        self._accelerator = accelerator
        self._reactor = reactor
        self._queues: dict[str, queue.SimpleQueue[tuple[Event, Then] | None]] = {}

    def outward(self) -> contextlib.AbstractContextManager[None]:
        """Compute on the lane out of the device."""
        return self._accelerator.lane("comm_out")

    def fetch(self, spans: Spans, start: int, stop: int, into: Tensor, then: Then) -> None:
        """Copy on the lane out of the device."""
        with self._accelerator.lane("comm_out"):
            at = 0
            for piece in spans.cut(start, stop):
                size = piece.numel() * spans.itemsize
                self._accelerator.to_host(as_bytes(piece), into[at : at + size])
                at += size
            self._tell("comm_out", then)

    def store(
        self, spans: Spans, start: int, source: Tensor, combine: Combine | None, then: Then
    ) -> None:
        """Copy or combine on the lane into the device."""
        with self._accelerator.lane("comm_in"):
            arrived = self._accelerator.to_device(source)
            if combine is None:
                spans.scatter(start, start + source.numel(), arrived)
            else:
                _combine(spans, start, arrived, combine)
            self._tell("comm_in", then)

    def follow(self, event: Event) -> None:
        """Let both lanes wait for a point of the caller's work."""
        for lane in ("comm_out", "comm_in"):
            with self._accelerator.lane(lane):
                event.wait()

    def drain(self) -> None:
        """Wait until both lanes have done what they were given."""
        for lane in self._queues:
            with self._accelerator.lane(lane):
                event = self._accelerator.event()
                event.record()
            event.synchronize()

    def _tell(self, lane: str, then: Then) -> None:
        event = self._accelerator.event()
        event.record()
        if lane not in self._queues:
            self._queues[lane] = queue.SimpleQueue()
            threading.Thread(
                target=self._watch, args=(self._queues[lane],), name=f"tutti-{lane}", daemon=True
            ).start()
        self._queues[lane].put((event, then))

    def _watch(self, events: queue.SimpleQueue[tuple[Event, Then] | None]) -> None:
        while (item := events.get()) is not None:
            event, then = item
            event.synchronize()
            self._reactor.call(then)

    def close(self) -> None:
        """End the waiting threads."""
        for events in self._queues.values():
            events.put(None)
