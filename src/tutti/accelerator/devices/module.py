"""Devices that torch gives a module of their own: `torch.cuda`, `torch.npu`, any plug-in's.

The module's functions have the same names everywhere; what one lacks is done without, and said.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tutti.accelerator.accelerator import Accelerator, DeviceMemoryError, Event, MemoryUse
from tutti.accelerator.choices import Choices
from tutti.accelerator.operators import Operators
from tutti.errors import TuttiError
from tutti.hardware.discover import match_chip
from tutti.hardware.library import shipped
from tutti.hardware.smi import Device


def catalog_name(name: str, memory_bytes: int) -> str:
    """Return what the catalog calls a device; its own name where the catalog has none."""
    chip = match_chip(Device(index=0, name=name, memory_bytes=memory_bytes), shipped())
    return name if chip is None else chip.name


class MissingFunctionError(TuttiError, AttributeError):
    """A plug-in's module lacks a function that torch's own modules have."""


class DeviceModule:
    """A device type's torch module, which says in one line what it lacks."""

    def __init__(self, device_type: str) -> None:
        self._name = f"torch.{device_type}"
        self._module = torch.get_device_module(device_type)

    def __getattr__(self, name: str) -> Any:
        try:
            return getattr(self._module, name)
        except AttributeError:
            raise MissingFunctionError(
                f"{self._name} has no '{name}', which this needs; update the device's torch plug-in"
            ) from None


class ModuleEvent:
    """An event of a device module."""

    def __init__(self, module: Any, timed: bool) -> None:
        self._module = module
        self._event = module.Event(enable_timing=timed)

    def record(self) -> None:
        """Mark the end of what the current stream was given so far."""
        self._event.record()

    def wait(self) -> None:
        """Let the current stream wait for the mark."""
        self._module.current_stream().wait_event(self._event)

    def synchronize(self) -> None:
        """Let the host wait for the mark."""
        self._event.synchronize()

    def passed(self) -> bool:
        """Tell whether the mark has been reached by now; nobody waits."""
        reached: bool = self._event.query()
        return reached

    def seconds_since(self, earlier: ModuleEvent) -> float:
        """Return the time between two marks that have passed."""
        milliseconds: float = earlier._event.elapsed_time(self._event)
        return milliseconds * 1e-3


class ModuleAccelerator(Accelerator):
    """A device whose torch module has streams, events and memory statistics."""

    def __init__(
        self, *, name: str, device_type: str, chip: str, collective_backend: str, index: int = 0
    ) -> None:
        self.name, self.chip, self.collective_backend = name, chip, collective_backend
        self.device = torch.device(device_type, index)
        self.module = DeviceModule(device_type)
        self.module.set_device(index)
        self.operators = Operators(device_type, choices=Choices.of_chip(chip))
        self._streams: dict[str, Any] = {}
        self._capture_stream: Any = None
        self._limit: int | None = None

    # --- memory ----------------------------------------------------------------------------

    @property
    def _device_bytes(self) -> int:
        if hasattr(self.module, "mem_get_info"):
            return int(self.module.mem_get_info(self.device.index)[1])
        return int(self.module.get_device_properties(self.device.index).total_memory)

    def memory(self) -> MemoryUse:
        """Return how many bytes are in use."""
        return MemoryUse(
            total=self._limit if self._limit is not None else self._device_bytes,
            allocated=int(self.module.memory_allocated(self.device.index)),
            peak=int(self.module.max_memory_allocated(self.device.index)),
        )

    def taken_bytes(self) -> int:
        """Return what the module's allocator has of the device."""
        if not hasattr(self.module, "memory_reserved"):
            return self.memory().allocated
        return int(self.module.memory_reserved(self.device.index))

    def limit_memory(self, num_bytes: int | None) -> None:
        """Let allocations beyond `num_bytes` fail."""
        fraction = 1.0 if num_bytes is None else min(1.0, num_bytes / self._device_bytes)
        self.module.set_per_process_memory_fraction(fraction, self.device.index)
        self._limit = num_bytes

    def reset_peak(self) -> None:
        """Begin a new peak."""
        self.module.reset_peak_memory_stats(self.device.index)

    def empty_cache(self) -> None:
        """Give cached memory back to the device."""
        self.module.empty_cache()

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return page-locked host memory."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Turn the device's out-of-memory error into ours."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError(str(error).splitlines()[0]) from error

    # --- streams ---------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait until the device has done everything."""
        self.module.synchronize(self.device.index)

    @contextlib.contextmanager
    def lane(self, name: str) -> Iterator[None]:
        """Run what is inside on the stream of that name."""
        if name == "compute":
            yield
            return
        if name not in self._streams:
            # of this device, whichever is current in a thread that did not open it
            self._streams[name] = self.module.Stream(device=self.device)
        with self.module.stream(self._streams[name]):
            yield

    def keep_for_lane(self, tensor: Tensor, name: str) -> None:
        """Tell the allocator that another stream still reads the tensor."""
        if name == "compute":
            tensor.record_stream(self.module.current_stream())
        elif name in self._streams:
            tensor.record_stream(self._streams[name])

    def event(self, *, timed: bool = False) -> Event:
        """Return a new event."""
        return ModuleEvent(self.module, timed)

    # --- random numbers --------------------------------------------------------------------

    def seed(self, value: int) -> None:
        """Seed the device's generator."""
        self.module.manual_seed(value)

    def random_state(self) -> Tensor:
        """Return the generator's state."""
        state: Tensor = self.module.get_rng_state(self.device.index)
        return state

    def restore_random_state(self, state: Tensor) -> None:
        """Set the generator's state."""
        self.module.set_rng_state(state, self.device.index)

    # --- graphs ----------------------------------------------------------------------------

    def _graph_type(self) -> Any:
        """Return the module's class of graphs; None where it has none that can be captured."""
        if not hasattr(self.module, "graph"):
            return None
        names = ("CUDAGraph", "NPUGraph", "XPUGraph", "Graph")
        return next((getattr(self.module, n) for n in names if hasattr(self.module, n)), None)

    def graph_pool(self) -> object | None:
        """Return a pool of the module's, where it has graphs that share memory."""
        if self._graph_type() is None or not hasattr(self.module, "graph_pool_handle"):
            return None
        pool: object = self.module.graph_pool_handle()
        return pool

    def capture(
        self, function: Callable[[], Any], *, pool: object | None = None, warm_ups: int = 3
    ) -> Callable[[], Any] | None:
        """Return a replay of the work as one graph, where the module has graphs.

        All captures use one stream: what libraries keep per stream is then made once.
        """
        graph_type = self._graph_type()
        if graph_type is None:
            return None
        if self._capture_stream is None:
            self._capture_stream = self.module.Stream(device=self.device)
        stream = self._capture_stream
        if warm_ups:
            stream.wait_stream(self.module.current_stream())
            with self.module.stream(stream):
                for _ in range(warm_ups):
                    function()
            self.module.current_stream().wait_stream(stream)
        graph = graph_type()
        with (
            _no_garbage_collection(),
            self.module.graph(graph, pool=pool, stream=stream, **self._capture_options()),
        ):
            result = function()

        def replay() -> Any:
            graph.replay()
            return result

        return replay

    def _capture_options(self) -> dict[str, str]:
        """Let other threads go on (to pin memory for the next batch, say) during a capture."""
        known = inspect.signature(self.module.graph).parameters
        return {"capture_error_mode": "thread_local"} if "capture_error_mode" in known else {}


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keep Python from freeing what the device has of others in the midst of a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
