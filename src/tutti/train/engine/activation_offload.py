"""Activations of a unit that wait in host memory between its forward and its backward.

While a forward pass runs inside `hooks`, everything that autograd saves passes through here.
`offload` copies it to pinned host memory on the copy lane and lets go of the device's copy; `fetch`
brings it back before backward asks for it. Whole storages are moved, once each, so that views come
back with the layout that kernels saw. Parameters, and what the caller holds anyway, stay.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tutti.accelerator.accelerator import Accelerator, Event
from tutti.train.state.host_vectors import COPY_IN, COPY_OUT

LEAST_BYTES = 1 << 12  # smaller tensors are not worth a copy


@dataclass(slots=True)
class _Slot:
    """One saved storage, as bytes: on the device, on the host, or on its way."""

    device: Tensor | None
    host: Tensor | None = None
    ready: Event | None = None


class _View(NamedTuple):
    """A saved tensor, as a view of a slot."""

    slot: int
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class SavedActivations:
    """What one unit's forward saved for its backward."""

    def __init__(self, accelerator: Accelerator, keep: Iterable[Tensor]) -> None:
        self._accelerator = accelerator
        self._keep = {tensor.untyped_storage().data_ptr() for tensor in keep}
        self._slots: list[_Slot] = []
        self._slot_of: dict[int, int] = {}  # address of a storage → its slot

    def hooks(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which what autograd saves is noted."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Tensor | _View:
        storage = tensor.untyped_storage()
        if storage.nbytes() < LEAST_BYTES or storage.data_ptr() in self._keep:
            return tensor
        slot = self._slot_of.get(storage.data_ptr())
        if slot is None:
            slot = self._slot_of[storage.data_ptr()] = len(self._slots)
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self._slots.append(_Slot(whole))
        return _View(
            slot, tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()
        )

    def _unpack(self, packed: Tensor | _View) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        slot = self._slots[packed.slot]
        if slot.ready is not None:
            slot.ready.wait()
        if slot.device is None:
            raise RuntimeError("an offloaded activation was used before it was fetched")
        empty = torch.empty(0, dtype=packed.dtype, device=slot.device.device)
        return empty.set_(slot.device.untyped_storage(), packed.offset, packed.size, packed.stride)

    @property
    def num_bytes(self) -> int:
        """How much is saved, wherever it is."""
        held = [slot.device if slot.device is not None else slot.host for slot in self._slots]
        return sum(tensor.numel() for tensor in held if tensor is not None)

    def offload(self) -> None:
        """Copy everything to the host and let go of it on the device."""
        self._slot_of.clear()
        done = self._accelerator.event()
        done.record()
        with self._accelerator.lane(COPY_OUT):
            done.wait()
            for slot in self._slots:
                assert slot.device is not None
                slot.host = self._accelerator.pinned(tuple(slot.device.shape), torch.uint8)
                self._accelerator.to_host(slot.device, slot.host)
                slot.ready = self._accelerator.event()
                slot.ready.record()
        for slot in self._slots:
            if slot.device is not None:
                self._accelerator.keep_for_lane(slot.device, COPY_OUT)
            slot.device = None

    def fetch(self) -> None:
        """Bring everything back."""
        with self._accelerator.lane(COPY_IN):
            for slot in self._slots:
                assert slot.host is not None
                if slot.ready is not None:
                    slot.ready.wait()
                slot.device = torch.empty_like(slot.host, device=self._accelerator.device)
                slot.device.copy_(slot.host, non_blocking=True)
                slot.ready = self._accelerator.event()
                slot.ready.record()
        for slot in self._slots:
            assert slot.device is not None
            self._accelerator.keep_for_lane(slot.device, "compute")
