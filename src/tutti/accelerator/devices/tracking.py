"""Counts the bytes of tensors on a device that keeps no statistics, and refuses beyond a limit.

Every operator's results pass through here while the tracker is on; a storage seen for the first
time is counted until it is collected. Views and in-place results share a storage and count once.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from tutti.accelerator.accelerator import DeviceMemoryError
from tutti.units import bytes_text


class MemoryTracker(TorchDispatchMode):
    """Bytes of the tensors made while it is on."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.allocated = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}  # of the storages that are counted
        self._host: set[int] = set()  # storages that stand for host memory
        _hide_from_compiler()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operator and count what it made, unseen by a compiler if there is one."""
        _hide_from_compiler()
        return self._run(func, types, args, kwargs)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tell torch not to wrap what runs an operator: the first call would import its compiler.

        That takes a second and a half in every process. It is wrapped once the compiler is there.
        """
        return False

    def _run(
        self, func: Any, _: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            # oneDNN's own layouts have no storage: they are weights' second form, and not counted
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and not leaf.is_mkldnn:
                self._count(leaf.untyped_storage(), func)
        return result

    def uncounted(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return a tensor that stands for host memory: neither it nor its views are counted."""
        with _disable_current_modes():
            tensor = make()
        storage = tensor.untyped_storage()
        self._host.add(storage._cdata)
        weakref.finalize(storage, self._host.discard, storage._cdata)
        return tensor

    def resize(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """Give a storage other memory."""
        key = storage._cdata
        before = self._sizes.get(key)
        self._require(num_bytes - (before or 0), "resize")
        storage.resize_(num_bytes)
        if before is None:
            self._add(storage)
        else:
            self._sizes[key] = num_bytes
            self._change(num_bytes - before)

    def _count(self, storage: torch.UntypedStorage, func: Any) -> None:
        if storage._cdata in self._sizes or storage._cdata in self._host or not storage.nbytes():
            return
        self._require(storage.nbytes(), func)
        self._add(storage)

    def _require(self, more: int, func: Any) -> None:
        if self.allocated + more > self.limit:
            raise DeviceMemoryError(
                f"{func}: {bytes_text(more)} more than the {bytes_text(self.allocated)} in use "
                f"would pass the limit of {bytes_text(self.limit)}"
            )

    def _add(self, storage: torch.UntypedStorage) -> None:
        self._sizes[storage._cdata] = storage.nbytes()
        self._change(storage.nbytes())
        weakref.finalize(storage, self._release, storage._cdata)

    def _change(self, more: int) -> None:
        self.allocated += more
        self.peak = max(self.peak, self.allocated)

    def _release(self, key: int) -> None:
        self._change(-self._sizes.pop(key))


def _hide_from_compiler() -> None:
    """Wrap what runs an operator as torch would have, once its compiler is there."""
    if "torch._dynamo" in sys.modules:
        disable: Any = torch._disable_dynamo  # type: ignore[attr-defined]
        MemoryTracker.__torch_dispatch__ = disable(  # type: ignore[method-assign]
            MemoryTracker._run, recursive=True
        )
