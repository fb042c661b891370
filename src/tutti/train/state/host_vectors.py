"""Flat vectors that live in host memory and visit the device.

Each direction has a lane of its own, as in the simulator: what comes and what goes pass each other.
An event tells when a copy is done, for the device or for the host. Memory on the device is held
only during a visit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tutti.accelerator.accelerator import Accelerator, Event

COPY_IN, COPY_OUT = "copy in", "copy out"  # lanes


class HostCopy:
    """A vector whose home is host memory."""

    def __init__(self, accelerator: Accelerator, size: int, dtype: torch.dtype) -> None:
        self._accelerator = accelerator
        self._host = accelerator.pinned((size,), dtype).zero_()
        self._device: Tensor | None = None
        self._visits = 0  # that were begun and not ended
        self._arrived: Event | None = None  # on the device
        self._stored: Event | None = None  # on the host

    @property
    def at_rest(self) -> Tensor:
        """The memory at home; the host reads it after `settle`, lanes after `home`."""
        return self._host

    def settle(self) -> None:
        """Let the host wait until the values are home."""
        if self._stored is not None:
            self._stored.synchronize()
            self._stored = None

    def home(self) -> Tensor:
        """Return the memory at home; the current lane waits until the values are there."""
        if self._stored is not None:
            self._stored.wait()
        return self._host

    def fetch(self) -> None:
        """Begin a visit to the device."""
        self._visits += 1
        if self._device is None:
            self._device, self._arrived = fetched(self._accelerator, self._host, self._stored)

    def arrive(self) -> Tensor:
        """Return the visitor; the current lane waits until it is there."""
        assert self._device is not None, "used before it was fetched"
        if self._arrived is not None:
            self._arrived.wait()
        return self._device

    def leave(self) -> None:
        """End a visit that changed nothing."""
        self._visits -= 1
        if self._visits == 0:
            self._device = None

    def put(self, values: Tensor) -> None:
        """Let new values be on the device, to be stored."""
        self._device, self._arrived = values, None

    def store(self) -> Event | None:
        """End all visits with what is on the device now, if anything; return when it is home."""
        if self._device is not None:
            self._stored = stored(self._accelerator, self._device, self._host)
        self._device, self._visits = None, 0
        return self._stored


class HostSum:
    """Vectors that add up in host memory."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._sum: Tensor | None = None
        self._coming: tuple[Tensor, Event] | None = None

    def add(self, part: Tensor) -> Event:
        """Add a vector of the device, whose memory is let go; return when it has left."""
        self._settle()
        staged = self._accelerator.pinned(tuple(part.shape), part.dtype)
        self._coming = staged, stored(self._accelerator, part, staged)
        return self._coming[1]

    def _settle(self) -> None:
        if self._coming is None:
            return
        (staged, ready), self._coming = self._coming, None
        ready.synchronize()
        self._sum = staged if self._sum is None else self._sum.add_(staged)

    @property
    def total(self) -> Tensor | None:
        """The sum on the host; None before anything was added."""
        self._settle()
        return self._sum

    def take(self) -> tuple[Tensor, Event] | None:
        """Bring the sum to the device and begin anew; None where there is none."""
        total, self._sum = self.total, None
        return None if total is None else fetched(self._accelerator, total)


def fetched(
    accelerator: Accelerator, host: Tensor, after: Event | None = None
) -> tuple[Tensor, Event]:
    """Copy to the device, `after` what brought it home; return the copy and when it is there."""
    with accelerator.lane(COPY_IN):
        if after is not None:
            after.wait()
        device = torch.empty_like(host, device=accelerator.device)
        device.copy_(host, non_blocking=True)
        arrived = accelerator.event()
        arrived.record()
    accelerator.keep_for_lane(device, "compute")
    return device, arrived


def stored(accelerator: Accelerator, device: Tensor, host: Tensor) -> Event:
    """Copy to the host, behind the current lane's work; return when it is there."""
    made = accelerator.event()
    made.record()
    with accelerator.lane(COPY_OUT):
        made.wait()
        accelerator.to_host(device, host)
        arrived = accelerator.event()
        arrived.record()
    accelerator.keep_for_lane(device, COPY_OUT)
    return arrived
