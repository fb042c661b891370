"""`KeySender`: what a rank has computed of prompts leaves it, unit by unit, behind the computation.

A unit's new numbers are gathered from their pages as soon as they are stored, copied to the host
beside the next unit's computation, and sent by a thread (`Outbox`).
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import zmq
from torch import Tensor

from tutti.accelerator import Accelerator
from tutti.batching.step import Step
from tutti.models import ModelSpec
from tutti.nn import PagedCache
from tutti.serve.handover.handed import Handover
from tutti.serve.handover.layout import EngineLayout, Part, parts_between
from tutti.serve.handover.wire import PartHeader, dtype_name, encoded
from tutti.serve.staging import Download

log = logging.getLogger(__name__)
MOST_UNSENT = 20_000  # messages; what is beyond is not sent, and computed again


class Address(NamedTuple):
    """A rank of an engine as it was started the last time."""

    engine: int
    generation: int
    rank: int


@dataclass(frozen=True, slots=True)
class Parcel:
    """Numbers on their way to the host, and where they go from there."""

    to: Address
    header: PartHeader
    download: Download


class Ways(Protocol):
    """How sockets of ranks find each other."""

    def bind(self, socket: zmq.Socket[bytes], at: Address) -> None:
        """Let a rank's socket listen."""

    def connect(self, socket: zmq.Socket[bytes], to: Address) -> None:
        """Let a socket call a rank's."""


class Outbox:
    """Sends parcels in the order in which they were posted, in a thread."""

    def __init__(self, ways: Ways) -> None:
        self._ways = ways
        self._parcels: queue.SimpleQueue[Parcel | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    def post(self, parcel: Parcel) -> None:
        """Take a parcel."""
        self._parcels.put(parcel)

    def close(self) -> None:
        """Send what is there, then end."""
        self._parcels.put(None)
        self._thread.join(5.0)

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        sockets: dict[Address, zmq.Socket[bytes]] = {}
        while (parcel := self._parcels.get()) is not None:
            if parcel.to not in sockets:
                self._leave_old(sockets, parcel.to)
                sockets[parcel.to] = self._connected(context, parcel.to)
            arrays = parcel.download.wait()
            frames = [encoded(parcel.header), *(array.tobytes() for array in arrays)]
            try:
                sockets[parcel.to].send_multipart(frames, zmq.NOBLOCK)
            except zmq.Again:
                log.warning("engine %d takes no more keys and values", parcel.to.engine)
        for socket in sockets.values():
            socket.close(1000)
        context.term()

    def _connected(self, context: zmq.Context[zmq.Socket[bytes]], to: Address) -> zmq.Socket[bytes]:
        socket = context.socket(zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, MOST_UNSENT)
        self._ways.connect(socket, to)
        return socket

    @staticmethod
    def _leave_old(sockets: dict[Address, zmq.Socket[bytes]], to: Address) -> None:
        """Close what leads to an engine that has been started anew since."""
        for other in [a for a in sockets if (a.engine, a.rank) == (to.engine, to.rank)]:
            with contextlib.suppress(zmq.ZMQError):
                sockets.pop(other).close(0)


@dataclass(frozen=True, slots=True)
class _Row:
    """Tokens of a prompt that a step computes."""

    handover: Handover
    total: int
    start: int
    places_t: Tensor  # of these tokens in the pages


class KeySender:
    """Sends the keys and values of one rank's pages."""

    def __init__(
        self,
        spec: ModelSpec,
        own: EngineLayout,
        rank: int,
        others: Mapping[int, EngineLayout],
        cache: PagedCache,
        accelerator: Accelerator,
        post: Callable[[Parcel], None],
    ) -> None:
        self._cache, self._accelerator, self._post = cache, accelerator, post
        self._page_size, self._others = cache.page_size, others
        self._parts: dict[int, dict[int, list[Part]]] = {}  # by engine, by unit
        for engine, layout in others.items():
            by_unit = self._parts.setdefault(engine, {})
            for part in parts_between(spec, own, layout):
                if part.source == rank:
                    by_unit.setdefault(part.unit, []).append(part)
        self._rows: list[_Row] = []
        cache.on_stored = self._stored

    def begin(self, step: Step, rows: Sequence[tuple[int, Handover, int]]) -> None:
        """Take note of a step's rows whose keys and values go elsewhere: row, where, prompt."""
        self._rows = []
        fresh = {begin.slot for begin in step.begins}
        for row, handover, prompt in rows:
            layout = self._others.get(handover.engine)
            if layout is None:
                continue
            total = prompt // layout.page_size * layout.page_size
            start = int(step.starts[row])
            stop = min(total, start + int(step.queries[row]))
            if start and int(step.slots[row]) in fresh:  # what the prefix tree had
                cached = self._row(step, row, handover, total, 0, min(start, total))
                for unit in self._cache.units:
                    self._send(unit, cached)
            if stop > start:
                self._rows.append(self._row(step, row, handover, total, start, stop))

    def _row(
        self, step: Step, row: int, handover: Handover, total: int, start: int, stop: int
    ) -> _Row:
        at = torch.arange(start, stop)
        pages = torch.from_numpy(step.tables[row]).long()[at // self._page_size]
        places = pages * self._page_size + at % self._page_size
        return _Row(handover, total, start, self._accelerator.to_device(places))

    def _stored(self, unit: int) -> None:
        for row in self._rows:
            self._send(unit, row)

    def _send(self, unit: int, row: _Row) -> None:
        parts = self._parts[row.handover.engine].get(unit, ())
        if not parts:
            return
        held = [
            tensor.view(-1, *tensor.shape[2:])[row.places_t] for tensor in self._cache.units[unit]
        ]
        for part in parts:
            low, high = part.given
            # latents have no heads
            sliced = held if len(held) == 1 else [tensor[:, low:high] for tensor in held]
            header = PartHeader(
                key=row.handover.key,
                unit=unit,
                total=row.total,
                start=row.start,
                heads=part.taken,
                shapes=tuple(tuple(tensor.shape[1:]) for tensor in sliced),
                dtypes=tuple(dtype_name(tensor.dtype) for tensor in sliced),
            )
            as_bytes = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in sliced)
            to = Address(row.handover.engine, row.handover.generation, part.target)
            self._post(Parcel(to, header, Download(self._accelerator, *as_bytes)))
