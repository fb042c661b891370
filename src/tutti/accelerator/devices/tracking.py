"""Counts the bytes of tensors on a device that keeps no statistics, and refuses beyond a limit.

Every operator's results pass through here while the tracker is on; a storage seen for the first
time is counted until it is collected. Views and in-place results share a storage and count once.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
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
        self._known: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operator and count what it made."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
                self._count(leaf.untyped_storage(), func)
        return result

    def _count(self, storage: torch.UntypedStorage, func: Any) -> None:
        key = storage._cdata
        if key in self._known or not storage.nbytes():
            return
        size = storage.nbytes()
        if self.allocated + size > self.limit:
            raise DeviceMemoryError(
                f"{func}: {bytes_text(size)} more than the {bytes_text(self.allocated)} in use "
                f"would pass the limit of {bytes_text(self.limit)}"
            )
        self._known.add(key)
        self.allocated += size
        self.peak = max(self.peak, self.allocated)
        weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.allocated -= size
