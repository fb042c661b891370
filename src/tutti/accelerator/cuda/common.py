"""What the Triton kernels share: when they may run, and how rows are laid out."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST_ROW = 16384  # elements that one program holds at once


def reason_against(*tensors: Tensor | None) -> str | None:
    """Say why Triton kernels cannot take these tensors, or None."""
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.dtype not in DTYPES:
            return f"no {str(tensor.dtype).removeprefix('torch.')}"
        if tensor.numel() == 0:
            return "an empty tensor"
        if tensor.stride(-1) != 1:
            return "elements of a row that do not follow each other"
    # Inside torch.compile the plain composition is fused by the compiler itself.
    return "being compiled" if torch.compiler.is_compiling() else None


def rows_of(x: Tensor) -> Tensor:
    """Return the tensor as a matrix of rows; a copy only where its layout has no such view."""
    return x.reshape(-1, x.shape[-1])


@functools.lru_cache(maxsize=8)
def _units(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def num_programs(x: Tensor, per_unit: int = 4) -> int:
    """Return how many programs keep the device busy when each walks over many rows."""
    if x.device.type != "cuda":  # Triton's interpreter
        return 4
    return per_unit * _units(x.device)


def power_of_two(value: int) -> int:
    """Return the next power of two."""
    return 1 << max(0, value - 1).bit_length()


def warps_for(width: int) -> int:
    """Return how many warps share a row."""
    return min(16, max(1, power_of_two(width) // 256))


@functools.cache
def zero_counters(device: torch.device, count: int) -> Tensor:
    """Return zeros that kernels count with and leave as zeros: a device's calls follow each other.

    They are made before a graph is captured, by the call that warms it up.
    """
    return torch.zeros(count, dtype=torch.int32, device=device)
