"""The second type of device as tutti drives it: what a vendor writes for its plug-in.

`TUTTI_ACCELERATORS=tests.support.second_device` makes it known to a process.
"""

from __future__ import annotations

import torch

from tests.support.python_device import NAME
from tutti.accelerator import Kind, add_kind
from tutti.accelerator.devices.module import ModuleAccelerator


class SlateAccelerator(ModuleAccelerator):
    """The machine has two; a process sees the one it opened as the first."""

    def __init__(self, index: int = 0) -> None:
        super().__init__(
            name=NAME, device_type=NAME, chip="Slate-1", collective_backend=f"{NAME}ccl", index=0
        )

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)


add_kind(Kind(name=NAME, count=lambda: 2, open=SlateAccelerator))
