"""NVIDIA GPUs (and AMD's under ROCm, which torch calls the same)."""

from __future__ import annotations

import contextlib
import time

import torch
from torch import Tensor

from tutti.accelerator.devices import kunlun
from tutti.accelerator.devices.module import ModuleAccelerator, catalog_name

# Of processes that share a GPU (MPS), what one had under way when it was killed is ended by the
# service some time later. Where the others gave memory that it had pinned, too, back to the driver
# meanwhile, they had an illegal memory access at 6 of 7 kills.
LOST_WORK_S = 20.0


def count() -> int:
    """Return how many are visible; none of them where Kunlun's plug-in stands in for CUDA."""
    if kunlun.installed():
        return 0
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def chip_name(index: int) -> str:
    """Return what the catalog calls a GPU."""
    name, memory = torch.cuda.get_device_name(index), torch.cuda.mem_get_info(index)[1]
    return catalog_name(name, memory)


class CudaAccelerator(ModuleAccelerator):
    """A GPU under CUDA or ROCm."""

    # `tutti bench blocks --compiled` on an H200: 0.97× for Llama's 8B block, 1.01× for 3B and 1B

    def __init__(self, index: int = 0) -> None:
        from tutti.accelerator import cuda  # registers its kernels

        cuda.register_all()
        super().__init__(
            name="cuda",
            device_type="cuda",
            chip=chip_name(index),
            collective_backend="nccl",
            index=index,
        )
        self._waiting: list[tuple[float, Tensor]] = []  # since when; memory to be taken back

    def pin(self, memory: Tensor) -> bool:
        """Register host memory with the driver, so that copies run at full speed."""
        # whoever pins is in touch with all others again: what was lost is over
        self._take_back(time.monotonic() - LOST_WORK_S)
        code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        if int(code):
            self._forget_error()
        return not int(code)

    def unpin(self, memory: Tensor) -> None:
        """Take host memory back from the driver."""
        if int(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())):
            self._forget_error()

    def unpin_later(self, memory: Tensor) -> None:
        """Take it back when memory is pinned in some later time."""
        self._waiting.append((time.monotonic(), memory))

    def _take_back(self, since: float) -> None:
        ready = [memory for began, memory in self._waiting if began <= since]
        self._waiting = [entry for entry in self._waiting if entry[0] > since]
        for memory in ready:
            self.unpin(memory)

    def _forget_error(self) -> None:
        """Clear what the runtime keeps of a failed call: the next kernel would be blamed for it."""
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self.device)
