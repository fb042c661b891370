"""`Accelerator`: the one device a process drives.

Everything above this layer talks to its chip through an `Accelerator`: memory and its limit,
streams and events, random numbers, pinned host copies, graph capture, the name of the collective
backend, and the operators. `DeviceModule` chips (CUDA, Ascend, Kunlun, any torch plug-in) share one
implementation over the module that torch gives each device type; the CPU has its own.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tutti.accelerator.operators import Operators


class DeviceMemoryError(torch.OutOfMemoryError):
    """The limit set for a device has no room for an allocation.

    It is torch's own error for a full device, so that one `except` catches both.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes on the device."""

    total: int  # what the process may use: the device, or its limit
    allocated: int
    peak: int  # the largest `allocated` since `reset_peak`


class Event(Protocol):
    """A point in a stream's work."""

    def record(self) -> None:
        """Mark the end of what the current stream was given so far."""

    def wait(self) -> None:
        """Let the current stream wait for the mark."""

    def synchronize(self) -> None:
        """Let the host wait for the mark."""

    def passed(self) -> bool:
        """Tell whether the mark has been reached by now; nobody waits."""

    def seconds_since(self, earlier: Any) -> float:
        """Return the time between two marks that have passed."""


class Accelerator(ABC):
    """One device and what it can do."""

    name: str  # of the kind: "cpu", "cuda", "ascend", …
    chip: str  # what the catalog calls it
    device: torch.device
    operators: Operators
    collective_backend: str  # as torch.distributed knows it

    # --- memory ----------------------------------------------------------------------------

    @property
    def counts_memory(self) -> bool:
        """Whether `memory` tells of this process's tensors alone."""
        return True

    @abstractmethod
    def memory(self) -> MemoryUse:
        """Return how many bytes are in use."""

    def taken_bytes(self) -> int:
        """Return what the process keeps of the device: in use, cached, and in pools of graphs."""
        return self.memory().allocated

    def free_bytes(self) -> int:
        """Return how much of the device's memory (or of its limit) this process may still take."""
        return self.memory().total - self.taken_bytes()

    @abstractmethod
    def limit_memory(self, num_bytes: int | None) -> None:
        """Let allocations beyond `num_bytes` raise torch.OutOfMemoryError; None lifts the limit."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Begin a new peak."""

    @abstractmethod
    def empty_cache(self) -> None:
        """Give cached memory back to the device."""

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return host memory that the device copies from and to at full speed."""
        return torch.empty(shape, dtype=dtype)

    def resize(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """Give a storage other memory, or none: tensors that lie in it stay where they are."""
        storage.resize_(num_bytes)

    def pin(self, memory: Tensor) -> bool:
        """Pin host memory that lies there already (a shared mapping); False where it cannot be."""
        del memory
        return False

    def unpin(self, memory: Tensor) -> None:
        """Undo `pin`, before the memory goes: its address may come back with other pages behind."""
        del memory

    def unpin_later(self, memory: Tensor) -> None:
        """Undo `pin` once nothing of a process that was lost can use the memory; it stays mapped.

        Where the device does not mind, that is at once.
        """
        self.unpin(memory)

    # --- streams ---------------------------------------------------------------------------

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has done everything."""

    @abstractmethod
    def lane(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Run what is inside on the stream of that name ("compute" is the default one)."""

    def keep_for_lane(self, tensor: Tensor, name: str) -> None:
        """Keep a tensor's memory from being used anew before a lane's work on it is done."""
        del tensor, name

    @abstractmethod
    def event(self, *, timed: bool = False) -> Event:
        """Return a new event."""

    # --- random numbers --------------------------------------------------------------------

    def seed(self, value: int) -> None:
        """Seed the device's generator."""
        torch.manual_seed(value)

    @abstractmethod
    def random_state(self) -> Tensor:
        """Return the generator's state, on the host."""

    @abstractmethod
    def restore_random_state(self, state: Tensor) -> None:
        """Set the generator's state."""

    # --- graphs ----------------------------------------------------------------------------

    def graph_pool(self) -> object | None:
        """Return memory for graphs to share; None where the chip has no graphs.

        What is let go during one capture may be used by the next, so graphs of one pool are
        replayed in the order in which they were captured.
        """
        return None

    def capture(
        self, function: Callable[[], Any], *, pool: object | None = None, warm_ups: int = 3
    ) -> Callable[[], Any] | None:
        """Return a replay of `function`'s work as one graph; None where the chip has no graphs.

        The function runs `warm_ups` times before, so that nothing is made for the first time inside
        of the graph. Capturing computes nothing: what the function returned has its numbers after a
        replay, at the same addresses each time.
        """
        del function, pool, warm_ups
        return None

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a compiled form of a function on tensors."""
        return torch.compile(function, dynamic=False)

    # --- emulation -------------------------------------------------------------------------

    @contextlib.contextmanager
    def paced(self, declared_s: float | None = None) -> Iterator[None]:
        """Give what is inside the time it would take on an emulated chip; nothing on a real one."""
        del declared_s
        yield

    # --- what every device does alike ------------------------------------------------------

    def to_device(self, tensor: Tensor) -> Tensor:
        """Return the tensor on this device; from pinned memory without waiting."""
        return tensor.to(self.device, non_blocking=tensor.is_pinned())

    def to_host(self, tensor: Tensor, into: Tensor | None = None) -> Tensor:
        """Copy to the host; into pinned memory without waiting (an event tells when done)."""
        if into is None:
            return tensor.to("cpu")
        return into.copy_(tensor, non_blocking=into.is_pinned())

    def __repr__(self) -> str:
        return f"{type(self).__name__}(chip={self.chip!r}, device={str(self.device)!r})"
