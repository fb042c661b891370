"""`Arrivals`: keys and values that come from elsewhere, in host memory until they are whole.

A rank takes the parts that it is sent, in any order of units and ranks; tokens of one unit and rank
come in order. What does not become whole is dropped when it is too old or room is needed; what is
whole stays until somebody wants it or says that nobody will.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import zmq
from torch import Tensor

from tutti.accelerator.reference.quantised_pages import widened
from tutti.batching.imported import Imported
from tutti.nn import PagedCache
from tutti.nn.cache import QUANTISED
from tutti.serve.handover.wire import PartHeader, decoded

log = logging.getLogger(__name__)
MOST_BYTES = 4 << 30
OLD_S = 60.0  # without another part


@dataclass(slots=True, eq=False)
class _Arriving:
    total: int
    units: dict[int, list[Tensor]] = field(default_factory=dict)
    reached: dict[int, np.ndarray] = field(default_factory=dict)  # tokens of each head, by unit
    num_bytes: int = 0
    changed: float = 0.0


class Arrivals:
    """What has arrived for one rank; `heads` are its own of each unit that it holds."""

    def __init__(
        self,
        heads: Mapping[int, int],
        *,
        most_bytes: int = MOST_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._heads, self._most_bytes, self._clock = dict(heads), most_bytes, clock
        self._held: dict[str, _Arriving] = {}
        self._lock = threading.Lock()

    @property
    def expects(self) -> bool:
        """Whether the rank holds a unit that has keys and values."""
        return bool(self._heads)

    def take(self, frames: Sequence[Any]) -> str | None:
        """Take a message; return the name of what became whole with it."""
        header, tensors = decoded(frames)
        with self._lock:
            self._drop_old()
            own = self._held.get(header.key)
            if own is None or own.total != header.total:
                own = self._held[header.key] = _Arriving(header.total)
            was = self._is_whole(own)
            self._put(own, header, tensors)
            self._make_room()
            there = header.key in self._held
            return header.key if there and self._is_whole(own) and not was else None

    def pop(self, key: str) -> dict[int, list[Tensor]] | None:
        """Return a prompt's tensors by unit, once; None: they are not all there."""
        with self._lock:
            own = self._held.pop(key, None)
        return own.units if own is not None and self._is_whole(own) else None

    def drop(self, key: str) -> None:
        """Forget what came of a prompt."""
        with self._lock:
            self._held.pop(key, None)

    def __len__(self) -> int:
        return len(self._held)

    def _put(self, own: _Arriving, header: PartHeader, tensors: list[Tensor]) -> None:
        unit, (low, high) = header.unit, header.heads
        count = self._heads.get(unit)
        if count is None or not 0 <= low < high <= count:
            raise ValueError(f"heads {low}-{high} of unit {unit} are not this rank's")
        latent = len(tensors) == 1
        if unit not in own.units:
            own.units[unit] = [
                torch.empty(
                    header.total, *(shape if latent else (count, *shape[1:])), dtype=tensor.dtype
                )
                for shape, tensor in zip(header.shapes, tensors, strict=True)
            ]
            own.reached[unit] = np.zeros(count, np.int64)
            own.num_bytes += sum(t.numel() * t.element_size() for t in own.units[unit])
        start, stop = header.start, header.start + len(tensors[0])
        reached = own.reached[unit]
        if start > reached[low:high].min():  # what precedes it was lost: so is it
            return
        for held, new in zip(own.units[unit], tensors, strict=True):
            into = held[start:stop] if latent else held[start:stop, low:high]
            if into.shape != new.shape:
                raise ValueError(f"unit {unit}: {tuple(new.shape)} for {tuple(into.shape)}")
            into.copy_(new)
        reached[low:high] = np.maximum(reached[low:high], stop)
        own.changed = self._clock()

    def _is_whole(self, own: _Arriving) -> bool:
        return own.units.keys() == self._heads.keys() and all(
            int(reached.min()) >= own.total for reached in own.reached.values()
        )

    def _drop_old(self) -> None:
        now = self._clock()
        for key, own in list(self._held.items()):
            if now - own.changed > OLD_S and not self._is_whole(own):
                del self._held[key]

    def _make_room(self) -> None:
        total = sum(own.num_bytes for own in self._held.values())
        for key, own in list(self._held.items()):
            if total > self._most_bytes and not self._is_whole(own):
                total -= self._held.pop(key).num_bytes


class Inbox:
    """Listens for a rank's arrivals in a thread; `whole` hears of each that is complete."""

    def __init__(
        self,
        arrivals: Arrivals,
        bind: Callable[[zmq.Socket[bytes]], None],
        whole: Callable[[str], None],
    ) -> None:
        self._arrivals, self._whole = arrivals, whole
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        bind(self._socket)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="inbox", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End."""
        self._closed = True
        self._thread.join(5.0)
        self._context.destroy(0)

    def _run(self) -> None:
        while not self._closed:
            if not self._socket.poll(100):
                continue
            frames = self._socket.recv_multipart()
            try:
                key = self._arrivals.take(frames)
            except (ValueError, RuntimeError) as error:
                log.warning("keys and values that are none: %s", error)
                continue
            if key is not None:
                self._whole(key)


@torch.no_grad()
def write_pages(cache: PagedCache, arrived: Mapping[int, list[Tensor]], new: Imported) -> None:
    """Write what arrived to pages, in the format that these have."""
    if not len(new.pages):
        return
    size = cache.page_size
    first, stop = new.first, new.first + len(new.pages) * size
    for unit, tensors in arrived.items():
        pages = cache.units[unit]
        rows = [tensor[first:stop].to(pages[0].device) for tensor in tensors]
        same = len(rows) == len(pages) and rows[0].dtype == pages[0].dtype
        if len(rows) == QUANTISED and not same:
            kind = torch.float32
            pairs = zip(rows[:2], rows[2:], strict=True)
            rows = [widened(codes, scales, kind) for codes, scales in pairs]
        if len(pages) == QUANTISED and not same:
            offsets = torch.arange(size)
            places = torch.from_numpy(new.pages).long()[:, None] * size + offsets
            places = places.view(-1).to(pages[0].device)
            keys, values, *scales = pages
            cache.operators.store_quantised_pages(
                rows[0], rows[1], keys, values, scales[0], scales[1], places
            )
            continue
        at = torch.from_numpy(new.pages).long().to(pages[0].device)
        for held, row in zip(pages, rows, strict=True):
            held[at] = row.to(held.dtype).view(len(new.pages), size, *row.shape[1:])
