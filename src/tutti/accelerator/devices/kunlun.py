"""Kunlun XPUs through Baidu's torch plug-in, torch_xmlir; collectives through BKCL (XCCL).

The plug-in takes the place of CUDA beneath torch: its devices call themselves "cuda", and its
collective library answers to the name "nccl" ("xccl" is Intel's in torch). It must be imported
before the first CUDA call, so Kunlun is asked before CUDA, and CUDA counts none where it is there.
All of this is from what is public about the plug-in and from projects that use it; which functions
of `torch.cuda` it lacks is not. No Kunlun was at hand: run the conformance kit on the chip itself.
"""

from __future__ import annotations

import importlib
import importlib.util

import torch

from tutti.accelerator.devices.module import ModuleAccelerator

PLUG_IN = "torch_xmlir"
DEVICE_TYPE = "cuda"
CHIP = "Kunlun-P800"  # the chip that the plug-in is public for


def installed() -> bool:
    """Tell whether the plug-in is here."""
    return importlib.util.find_spec(PLUG_IN) is not None


def count() -> int:
    """Return how many are visible."""
    if not installed():
        return 0
    importlib.import_module(PLUG_IN)
    return int(torch.get_device_module(DEVICE_TYPE).device_count())


class KunlunAccelerator(ModuleAccelerator):
    """A Kunlun XPU."""

    def __init__(self, index: int = 0) -> None:
        importlib.import_module(PLUG_IN)
        super().__init__(
            name="kunlun",
            device_type=DEVICE_TYPE,
            chip=CHIP,
            collective_backend="nccl",
            index=index,
        )
