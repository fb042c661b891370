"""Small tensors from the host to a device without the host waiting for the device.

A copy from ordinary host memory makes the host wait until the device has done all that it was
given before. Through pinned memory the copy is queued like a kernel; torch keeps the pinned memory
until it is done.
"""

from __future__ import annotations

import torch
from torch import Tensor

_CANNOT_PIN: set[str] = set()  # types of devices without pinned memory


def moved(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return a host tensor on a device, in the order of the current stream."""
    target = torch.device(device)
    if target.type == tensor.device.type or target.type in _CANNOT_PIN | {"meta"}:
        return tensor.to(target)
    try:
        pinned = tensor.pin_memory()
    except (RuntimeError, NotImplementedError):
        _CANNOT_PIN.add(target.type)
        return tensor.to(target)
    return pinned.to(target, non_blocking=True)
