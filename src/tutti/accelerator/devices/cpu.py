"""The CPU as an accelerator: streams are the program's own order, memory is the process's."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from tutti.accelerator.accelerator import Accelerator, Event, MemoryUse
from tutti.accelerator.choices import Choices
from tutti.accelerator.devices.tracking import MemoryTracker
from tutti.accelerator.operators import Operators


class HostEvent:
    """An event on the host: everything before it has happened."""

    def __init__(self) -> None:
        self.at = 0.0

    def record(self) -> None:
        """Mark now."""
        self.at = time.perf_counter()

    def wait(self) -> None:
        """Nothing is outstanding."""

    def synchronize(self) -> None:
        """Nothing is outstanding."""

    def passed(self) -> bool:
        """Nothing is outstanding."""
        return True

    def seconds_since(self, earlier: HostEvent) -> float:
        """Return the time between two marks."""
        return self.at - earlier.at


class CpuAccelerator(Accelerator):
    """The host's processor and memory.

    Memory is tracked only while a limit is set, for tracking costs time: without one, `memory`
    tells the resident size of the process.
    """

    name = "cpu"
    collective_backend = "gloo"

    def __init__(self, *, chip: str = "CPU") -> None:
        self.chip = chip
        self.device = torch.device("cpu")
        self.operators = Operators("cpu", choices=Choices.of_chip(chip))
        self._tracker: MemoryTracker | None = None
        self._peak = 0

    @property
    def counts_memory(self) -> bool:
        """Whether a limit is set, and so tensors are tracked."""
        return self._tracker is not None

    def memory(self) -> MemoryUse:
        """Return tracked bytes under a limit, else the process's resident size."""
        if self._tracker is not None:
            tracker = self._tracker
            return MemoryUse(total=tracker.limit, allocated=tracker.allocated, peak=tracker.peak)
        import psutil  # only here: a rank that never asks need not have it

        resident = psutil.Process().memory_info().rss
        self._peak = max(self._peak, resident)
        return MemoryUse(total=psutil.virtual_memory().total, allocated=resident, peak=self._peak)

    def free_bytes(self) -> int:
        """Return what is left under the limit, or half of what nobody on the host uses."""
        if self._tracker is not None:
            return self._tracker.limit - self._tracker.allocated
        import psutil

        return int(psutil.virtual_memory().available) // 2

    def limit_memory(self, num_bytes: int | None) -> None:
        """Let tensors beyond `num_bytes` fail; counts those made since a limit was first set."""
        if num_bytes is None:
            if self._tracker is not None:
                self._tracker.__exit__(None, None, None)
                self._tracker = None
        elif self._tracker is not None:
            self._tracker.limit = num_bytes
        else:
            self._tracker = MemoryTracker(num_bytes)
            self._tracker.__enter__()

    def reset_peak(self) -> None:
        """Begin a new peak."""
        self._peak = 0
        if self._tracker is not None:
            self._tracker.peak = self._tracker.allocated

    def empty_cache(self) -> None:
        """Do nothing: torch caches no host memory."""

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory that does not count as the device's."""
        if self._tracker is None:
            return super().pinned(shape, dtype)
        return self._tracker.uncounted(lambda: torch.empty(shape, dtype=dtype))

    def resize(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """Give a storage other memory, and count it."""
        if self._tracker is None:
            super().resize(storage, num_bytes)
        else:
            self._tracker.resize(storage, num_bytes)

    def synchronize(self) -> None:
        """Do nothing: work is done when it returns."""

    @contextlib.contextmanager
    def lane(self, name: str) -> Iterator[None]:
        """Run what is inside; the host has one order of work."""
        del name
        yield

    def event(self, *, timed: bool = False) -> Event:
        """Return a new event."""
        del timed
        return HostEvent()

    def random_state(self) -> Tensor:
        """Return the generator's state."""
        return torch.get_rng_state()

    def restore_random_state(self, state: Tensor) -> None:
        """Set the generator's state."""
        torch.set_rng_state(state)
