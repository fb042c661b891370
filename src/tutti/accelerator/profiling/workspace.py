"""Tensors to measure with, cut from one buffer of random numbers per number format.

Filling large tensors takes longer than many of the measurements; views of one buffer cost nothing.
The numbers are random because a chip's power, and so its clock, depends on them, and small so that
no exponential of a product vanishes: a host computes with vanishing numbers a hundred times slower.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tutti.accelerator.accelerator import Accelerator
from tutti.hardware.chip import Dtype

TORCH_DTYPES = {
    Dtype.FP32: torch.float32,
    Dtype.BF16: torch.bfloat16,
    Dtype.FP16: torch.float16,
}
_ALIGNED = 512  # elements to which views are aligned
HOST_ELEMENTS, DEVICE_ELEMENTS = 1 << 25, 1 << 29
SHARE_OF_MEMORY = 1 / 16
DEVIATION = 0.1
HOST_CACHE, DEVICE_CACHE = 1 << 25, 1 << 27  # bytes that leave the caches of one processor


class Workspace:
    """Random tensors on a device."""

    def __init__(self, accelerator: Accelerator, dtype: Dtype) -> None:
        self.device, self.dtype = accelerator.device, TORCH_DTYPES[dtype]
        self.total_bytes = accelerator.memory().total
        most = HOST_ELEMENTS if self.device.type == "cpu" else DEVICE_ELEMENTS
        room = int(self.total_bytes * SHARE_OF_MEMORY / dtype.num_bytes)
        accelerator.seed(0)
        size = max(_ALIGNED, min(most, room))
        self._buffer = torch.empty(size, device=self.device, dtype=self.dtype).normal_(
            std=DEVIATION
        )
        self._next = 0
        self.element_bytes = dtype.num_bytes
        self.cache_bytes = HOST_CACHE if self.device.type == "cpu" else DEVICE_CACHE

    def take(self, *shape: int, gradient: bool = True) -> Tensor:
        """Return a random tensor that asks for its gradient."""
        count = math.prod(shape)
        if count > self._buffer.numel():
            fresh = torch.empty(shape, device=self.device, dtype=self.dtype).normal_(std=DEVIATION)
            return fresh.requires_grad_(gradient)
        if self._next + count > self._buffer.numel():
            self._next = 0
        view = self._buffer[self._next : self._next + count].view(shape).detach()
        self._next += -(-count // _ALIGNED) * _ALIGNED
        return view.requires_grad_(gradient)

    def like(self, other: Tensor) -> Tensor:
        """Return random numbers in the shape and format of another tensor."""
        if other.dtype != self.dtype:
            return torch.randn_like(other)
        return self.take(*other.shape, gradient=False)

    def numbers(self, high: int, *shape: int) -> Tensor:
        """Return whole numbers below `high`."""
        return torch.randint(0, high, shape, device=self.device)
