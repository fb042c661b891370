"""Kernels that are launched before the one before them has ended.

A chip takes a microsecond to start a kernel after another. Of steps that take a few milliseconds
and have hundreds of kernels that is a tenth. Such a kernel is started while its predecessor runs,
and waits where it first reads what others wrote; what nobody writes (weights) it may read before.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 256  # of a step whose kernels are short


@triton.jit
def wait(EARLY: tl.constexpr):
    """Wait until all that came before is written; then let the next kernel start."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@functools.cache
def _starts_early(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def early(rows: Tensor) -> dict[str, bool]:
    """Return the options of a kernel that calls `wait` before it reads anything others write."""
    on = rows.shape[0] <= ROWS and _starts_early(rows.device)
    return {"EARLY": on, "launch_pdl": on}
