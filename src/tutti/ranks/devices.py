"""From a chip of the plan to the device that a process drives."""

from __future__ import annotations

import os

from tutti.accelerator import Accelerator, open_accelerator
from tutti.accelerator.devices.cpu import CpuAccelerator
from tutti.accelerator.devices.emulated import EmulatedAccelerator
from tutti.accelerator.find import count, kind_of_vendor
from tutti.errors import InputError
from tutti.hardware.chip import Chip
from tutti.launch.identity import device_index
from tutti.ranks.local_capacity import DEVICE


def device_of(chip: Chip, slot: int) -> str:
    """Return which device of this machine stands for a chip in a slot of its node."""
    given = os.environ.get(DEVICE, "")
    if given:
        return given
    kind = kind_of_vendor(chip.vendor)
    if kind == "cpu":
        return "cpu"
    present = count(kind)
    if not present:
        raise InputError(
            f"chip '{chip.name}' needs a device of kind '{kind}', of which this machine has none; "
            f"start this rank where the chip is (tutti launch), or set {DEVICE}"
        )
    index = device_index(os.environ, slot)
    # One visible device may be shared by several ranks (MPS), or be the only one made visible.
    return f"{kind}:{index if index < present else 0}"


def open_chip(chip: Chip, slot: int) -> Accelerator:
    """Open the device for a chip; an emulated one computes on the host and keeps its own time."""
    if chip.emulated:
        slowed = chip.slowdown is not None
        return EmulatedAccelerator(
            chip=chip.name,
            mode="dilated" if slowed else "declared",
            factor=chip.slowdown or 1.0,
            memory_bytes=int(chip.memory_bytes),
        )
    device = device_of(chip, slot)
    if device == "cpu":
        return CpuAccelerator(chip=chip.name)
    accelerator = open_accelerator(device)
    if chip.memory_bytes < accelerator.memory().total:  # a part of a device is a chip of its own
        accelerator.limit_memory(int(chip.memory_bytes))
    return accelerator
