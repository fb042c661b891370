"""Numbers on their way between host and device, without either waiting for the other.

The device reads pinned memory some time after the host has written it. So there are several copies
of it, and one is written again only after the device has read it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tutti.accelerator import Accelerator
from tutti.accelerator.accelerator import Event

_NUMPY = {torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32}


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
