"""An accelerator on the host whose copies to and from it take the time that a slow bus takes."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from tutti.accelerator.devices.cpu import CpuAccelerator


class PacedEvent:
    """Passes when its lane has done what it was given."""

    def __init__(self, accelerator: StagedAccelerator) -> None:
        self._accelerator = accelerator
        self._due = 0.0

    def record(self) -> None:
        self._due = self._accelerator.busy_until.get(self._accelerator.current, 0.0)

    def wait(self) -> None:
        """Nothing of the caller is outstanding."""

    def synchronize(self) -> None:
        left = self._due - time.perf_counter()
        if left > 0:
            time.sleep(left)

    def passed(self) -> bool:
        return self._due <= time.perf_counter()

    def seconds_since(self, earlier: object) -> float:
        raise NotImplementedError


class StagedAccelerator(CpuAccelerator):
    """Copies at `bandwidth` bytes per second and direction, in the background."""

    copies_through_host = True

    def __init__(self, bandwidth: float) -> None:
        super().__init__()
        self.bandwidth = bandwidth
        self.busy_until: dict[str, float] = {}
        self.current = "compute"
        self.copied_bytes = 0

    def lane(self, name: str):  # type: ignore[no-untyped-def]
        accelerator = self

        class Lane:
            def __enter__(self) -> None:
                self.before, accelerator.current = accelerator.current, name

            def __exit__(self, *_: object) -> None:
                accelerator.current = self.before

        return Lane()

    def event(self, *, timed: bool = False) -> PacedEvent:  # type: ignore[override]
        return PacedEvent(self)

    def _pace(self, num_bytes: int) -> None:
        now = time.perf_counter()
        start = max(now, self.busy_until.get(self.current, 0.0))
        self.busy_until[self.current] = start + num_bytes / self.bandwidth
        self.copied_bytes += num_bytes

    def to_host(self, tensor: Tensor, into: Tensor | None = None) -> Tensor:
        self._pace(tensor.nbytes)
        return tensor.clone() if into is None else into.copy_(tensor)

    def to_device(self, tensor: Tensor) -> Tensor:
        self._pace(tensor.nbytes)
        return tensor

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)
