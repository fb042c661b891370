"""Huawei Ascend NPUs through torch_npu; collectives through HCCL.

Written against torch_npu's documented interface (`torch.npu` mirrors `torch.cuda`); run the
conformance kit on the chip itself: no Ascend was at hand when this was written.
"""

from __future__ import annotations

import importlib
import importlib.util

import torch

from tutti.accelerator.devices.module import ModuleAccelerator, catalog_name

PLUG_IN = "torch_npu"


def count() -> int:
    """Return how many are visible; importing the plug-in is what makes torch know them."""
    if importlib.util.find_spec(PLUG_IN) is None:
        return 0
    importlib.import_module(PLUG_IN)
    return int(torch.get_device_module("npu").device_count())


class AscendAccelerator(ModuleAccelerator):
    """An Ascend NPU."""

    def __init__(self, index: int = 0) -> None:
        importlib.import_module(PLUG_IN)
        from tutti.accelerator import ascend  # registers its fused operators

        ascend.register_all()
        module = torch.get_device_module("npu")
        memory = int(module.get_device_properties(index).total_memory)
        super().__init__(
            name="ascend",
            device_type="npu",
            chip=catalog_name(str(module.get_device_name(index)), memory),
            collective_backend="hccl",
            index=index,
        )
