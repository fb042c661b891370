"""Numbers on their way between host and device, without either waiting for the other.

The device reads pinned memory some time after the host has written it. So there are several copies
of it, and one is written again only after the device has read it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from tutti.accelerator import Accelerator
from tutti.accelerator.accelerator import Event
from tutti.errors import InputError
from tutti.nn import PagedCache
from tutti.plug_ins import reason
from tutti.units import bytes_text

_NUMPY = {torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32}
AT_ONCE = 64 << 20  # bytes on their way: memory that this takes on the device
TIMED = 32  # pages by which moves are timed
ROUNDS = 3  # the quickest counts
_WORDS = (torch.int64, torch.int32, torch.int16)


class Upload:
    """A tensor on the device at an address that stays, written from the host."""

    def __init__(
        self, accelerator: Accelerator, shape: tuple[int, ...], dtype: torch.dtype, depth: int
    ) -> None:
        self.device = torch.zeros(shape, dtype=dtype, device=accelerator.device)
        self._is_host = self.device.device.type == "cpu"
        self._buffers = [self.device] if self._is_host else []
        if not self._is_host:
            self._buffers = [accelerator.pinned(shape, dtype) for _ in range(depth)]
        self._read: list[Event] = [accelerator.event() for _ in self._buffers]
        self._sent = [False] * len(self._buffers)
        self._next = 0

    def host(self) -> np.ndarray:
        """Return memory to write; what is there before is of an earlier turn."""
        if self._sent[self._next]:
            self._read[self._next].synchronize()
        buffer: np.ndarray = self._buffers[self._next].numpy()
        return buffer

    def send(self, count: int | None = None) -> None:
        """Let the device have what was written: all of it, or the first numbers."""
        if self._is_host:
            return
        buffer = self._buffers[self._next]
        target = self.device if count is None else self.device.view(-1)[:count]
        source = buffer if count is None else buffer.view(-1)[:count]
        target.copy_(source, non_blocking=True)
        self._read[self._next].record()
        self._sent[self._next] = True
        self._next = (self._next + 1) % len(self._buffers)


class Download:
    """Tensors that come to the host while the device goes on."""

    def __init__(self, accelerator: Accelerator, *tensors: Tensor) -> None:
        self._is_host = all(tensor.device.type == "cpu" for tensor in tensors)
        self._arrived = accelerator.event()
        if self._is_host:
            self._tensors = [tensor.clone() for tensor in tensors]
            return
        self._tensors = [
            accelerator.to_host(tensor, accelerator.pinned(tuple(tensor.shape), tensor.dtype))
            for tensor in tensors
        ]
        self._arrived.record()

    def wait(self) -> list[np.ndarray]:
        """Return the numbers when they are there."""
        if not self._is_host:
            self._arrived.synchronize()
        return [tensor.numpy() for tensor in self._tensors]


class HostPages:
    """Pages of keys and values on the host, for sequences that wait for a slot.

    All that a page holds on this rank (every unit's keys and values, latents, codes and their
    scales) lies together, as bytes, in pinned memory. Copies are given to the device in the order
    of its steps, and nobody waits for them.
    """

    def __init__(self, accelerator: Accelerator, cache: PagedCache, pages: int) -> None:
        self._accelerator = accelerator
        self._parts = [_rows(tensor) for unit in cache.units.values() for tensor in unit]
        widths = [part.shape[1] * part.element_size() for part in self._parts]
        ends = np.cumsum(widths, dtype=np.int64).tolist()
        self._columns = [(end - width, end) for end, width in zip(ends, widths, strict=True)]
        self.page_bytes = ends[-1] if ends else 0  # a stage may hold no block
        rows = pages + 1 if pages else 0  # page 0 belongs to nobody, as on the device
        try:
            self._host = accelerator.pinned((rows, self.page_bytes), torch.uint8)
        except RuntimeError as error:
            raise InputError(
                f"serving: the host gives no {bytes_text(rows * self.page_bytes)} of memory for "
                f"{pages:,} pages ({reason(error)}); ask for less"
            ) from None
        self._most = max(1, AT_ONCE // max(1, self.page_bytes))

    def stow(self, pairs: np.ndarray) -> None:
        """Copy pages of the device to pages of the host."""
        for device, host in self._batches(pairs):
            index = self._index(device)
            rows = [part.index_select(0, index).view(torch.uint8) for part in self._parts]
            staged = torch.cat(rows, 1)
            for first, last, to in _runs(host):
                target = self._host[to : to + last - first]
                self._accelerator.to_host(staged[first:last], target)

    def fetch(self, pairs: np.ndarray) -> None:
        """Copy pages of the host to pages of the device."""
        for host, device in self._batches(pairs):
            arrived = [
                self._accelerator.to_device(self._host[at : at + last - first])
                for first, last, at in _runs(host)
            ]
            staged = torch.cat(arrived) if len(arrived) > 1 else arrived[0]
            index = self._index(device)
            for part, (first, last) in zip(self._parts, self._columns, strict=True):
                part[index] = staged[:, first:last].contiguous().view(part.dtype)

    def seconds(self) -> tuple[float, float]:
        """Return what a page takes out and back; the pages are nobody's yet."""
        count = min(TIMED, len(self._host) - 1, *(len(part) - 1 for part in self._parts))
        if count < 1 or not self._parts:
            return 0.0, 0.0
        same = np.repeat(np.arange(1, count + 1, dtype=np.int32)[:, None], 2, 1)
        best = [float("inf"), float("inf")]
        for _ in range(ROUNDS):
            for way, move in enumerate((self.stow, self.fetch)):
                self._accelerator.synchronize()
                started = time.perf_counter()
                move(same)
                self._accelerator.synchronize()
                best[way] = min(best[way], time.perf_counter() - started)
        return best[0] / count, best[1] / count

    def _batches(self, pairs: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield sources and targets of as many pages as move at once."""
        if self.page_bytes:
            for first in range(0, len(pairs), self._most):
                some = pairs[first : first + self._most]
                yield some[:, 0], some[:, 1]

    def _index(self, pages: np.ndarray) -> Tensor:
        return self._accelerator.to_device(torch.from_numpy(pages.astype(np.int64)))


def _rows(tensor: Tensor) -> Tensor:
    """Return pages as rows of the widest words that they are whole numbers of."""
    rows = tensor.view(torch.uint8).view(len(tensor), -1)
    for word in _WORDS:
        if rows.shape[1] % word.itemsize == 0:
            return rows.view(word)
    return rows


def _runs(pages: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Yield ranges of places whose pages follow each other, and the first page of each."""
    breaks = np.flatnonzero(np.diff(pages) != 1) + 1
    edges = [0, *breaks.tolist(), len(pages)]
    for first, last in itertools.pairwise(edges):
        yield first, last, int(pages[first])
