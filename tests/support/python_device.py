"""A torch plug-in made of Python alone: a type of device whose tensors lie in host memory.

torch knows it as it knows a vendor's: tensors say `slate:0`, mixing them with the host's is an
error, `torch.slate` has streams, events and memory statistics, and `slateccl` is its collective
backend. One such device fits into a process; import it in one of its own. `PYTHON_DEVICE` in the
environment gives it another name.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from typing import Any

import torch
from torch import distributed
from torch.utils import backend_registration

from tests.support import python_graphs as graphs

NAME = os.environ.get("PYTHON_DEVICE", "slate")
HERE = torch.device("cpu")
MEMORY_BYTES = 8 << 30


class PythonTensor(torch.Tensor):
    """A tensor of the device: torch sees its shape, the numbers are in `raw` on the host."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> PythonTensor:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device(NAME, 0),
        )
        made.raw = raw
        module.count(raw)
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, *args, **(kwargs or {}))

    def tolist(self) -> Any:  # torch refuses it for subclasses
        graphs.refuse_crossing("tolist")
        return self.raw.tolist()

    def data_ptr(self) -> int:  # torch has no storage of it
        return self.raw.data_ptr()

    def record_stream(self, stream: Stream) -> None:  # torch knows no stream of it
        """Nothing is kept: every stream's work is done when it is issued."""

    def __repr__(self, **_options: Any) -> str:
        return f"{NAME}({self.raw})"


class MixedDevicesError(RuntimeError):
    """Tensors of the host and of the device in one operator."""


def run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator on the host's numbers and give the results to the device."""
    aten = torch.ops.aten
    known: dict[int, PythonTensor] = {}
    elsewhere: list[torch.Tensor] = []

    def inner(value: Any) -> Any:
        if isinstance(value, PythonTensor):
            known[id(value.raw)] = value
            return value.raw
        if isinstance(value, torch.Tensor):
            elsewhere.append(value)
        return HERE if isinstance(value, torch.device) and value.type == NAME else value

    home = kwargs.get("device")
    host_args, host_kwargs = graphs.mapped(inner, args), graphs.mapped(inner, kwargs)
    graphs.refuse_host_reads(op)
    if op is aten._to_copy.default:
        stays = bool(known) if home is None else torch.device(home).type == NAME
        if stays != bool(known):
            graphs.refuse_crossing(f"copy between host and {NAME}")
        result = noted(op, host_args, host_kwargs)
        return PythonTensor(result) if stays else result
    if op is aten.copy_.default:
        if len(known) < len({id(t) for t in args[:2]}):
            graphs.refuse_crossing(f"copy between host and {NAME}")
        noted(op, host_args, host_kwargs)
        return args[0]
    joins = op in (aten.cat.default, aten.stack.default)
    for leaf in elsewhere if known else ():
        if leaf.dim() or joins:  # elsewhere a scalar may come from anywhere
            raise MixedDevicesError(f"{op}: a tensor on {leaf.device} among tensors on {NAME}:0")

    def outer(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        # an operator in place gives back the tensor that it got
        return known[id(value)] if id(value) in known else PythonTensor(value)

    return graphs.mapped(outer, noted(op, host_args, host_kwargs))


def noted(op: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator on the host's numbers; a graph that is being captured notes it."""
    graph = graphs.current()
    return op(*args, **kwargs) if graph is None else graph.run(op, args, kwargs)


def copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> Any:
    """Copy to or from the device where torch does so beneath its own dispatcher."""
    raw = [t.raw if isinstance(t, PythonTensor) else t for t in (target, source)]
    if not (isinstance(target, PythonTensor) and isinstance(source, PythonTensor)):
        graphs.refuse_crossing(f"copy between host and {NAME}")
    noted(torch.ops.aten.copy_.default, tuple(raw), {})
    return target


class Stream:
    """Work happens in the order of the program, whatever the stream."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device

    def wait_event(self, event: Event) -> None:
        event.synchronize()

    def wait_stream(self, stream: Stream) -> None:
        pass


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.enable_timing = enable_timing
        self.at: float | None = None

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        assert self.at is not None, "waited for an event that was not recorded"

    def query(self) -> bool:
        return self.at is not None

    def elapsed_time(self, later: Event) -> float:
        assert self.enable_timing
        assert self.at is not None
        assert later.at is not None
        return (later.at - self.at) * 1e3


class PythonDeviceModule:
    """What `torch.slate` holds, as a vendor's module does."""

    Stream, Event, Graph = Stream, Event, graphs.Graph

    def __init__(self) -> None:
        self.allocated = self.peak = 0
        self.limit = MEMORY_BYTES
        self._known: set[int] = set()
        self._current = Stream()

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, index: int) -> None:
        assert index == 0

    def synchronize(self, index: int | None = None) -> None:
        graphs.refuse_crossing("synchronize")

    def current_stream(self) -> Stream:
        return self._current

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Any:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    # --- graphs ---

    def graph_pool_handle(self) -> graphs.Pool:
        return graphs.Pool()

    @contextlib.contextmanager
    def graph(
        self, graph: graphs.Graph, pool: graphs.Pool | None = None, stream: Stream | None = None
    ) -> Any:
        graphs.begin(graph, pool)
        try:
            with self.stream(stream or self._current):
                yield
        except BaseException:
            graphs.finish(failed=True)
            raise
        graphs.finish(failed=False)

    # --- memory ---

    def count(self, raw: torch.Tensor) -> None:
        storage = raw.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or not size:
            return
        if self.allocated + size > self.limit:
            raise torch.OutOfMemoryError(
                f"{NAME}: {size} bytes more than the limit leaves room for"
            )
        self._known.add(key)
        self.allocated += size
        self.peak = max(self.peak, self.allocated)
        weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.allocated -= size

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return MEMORY_BYTES - self.allocated, MEMORY_BYTES

    def memory_allocated(self, index: int) -> int:
        return self.allocated

    def memory_reserved(self, index: int) -> int:
        return self.allocated + sum(b.size for pool in graphs.pools for b in pool.free)

    def max_memory_allocated(self, index: int) -> int:
        return self.peak

    def reset_peak_memory_stats(self, index: int) -> None:
        self.peak = self.allocated

    def set_per_process_memory_fraction(self, fraction: float, index: int) -> None:
        self.limit = int(MEMORY_BYTES * fraction)

    def empty_cache(self) -> None:
        pass

    # --- random numbers ---

    def manual_seed(self, seed: int) -> None:
        torch.random.default_generator.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, index: int = 0) -> torch.Tensor:
        return torch.random.default_generator.get_state()

    def set_rng_state(self, state: torch.Tensor, index: int = 0) -> None:
        torch.random.default_generator.set_state(state)


class PythonGroup(distributed.ProcessGroup):
    """Collectives of the device, carried by gloo."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._inner = distributed.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        return f"{NAME}ccl"


def _carried(name: str) -> Any:
    def call(self: PythonGroup, *args: Any, **kwargs: Any) -> Any:
        def raw(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                assert isinstance(value, PythonTensor), f"{name}: a tensor on {value.device}"
                return value.raw
            return value

        return getattr(self._inner, name)(*graphs.mapped(raw, args), **graphs.mapped(raw, kwargs))

    return call


# torch's names of the collectives and gloo's
for _name, _gloo in {
    "allreduce": "allreduce",
    "broadcast": "broadcast",
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
    "send": "send",
    "recv": "recv",
    "barrier": "barrier",
}.items():
    setattr(PythonGroup, _name, _carried(_gloo))


module = PythonDeviceModule()
backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=module)
_libraries = [torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")]
_libraries[0].fallback(run, "PrivateUse1")
_libraries[1].impl("_copy_from", copy_from, "PrivateUse1")
distributed.Backend.register_backend(f"{NAME}ccl", PythonGroup, devices=[NAME])
