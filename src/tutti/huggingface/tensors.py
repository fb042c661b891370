"""The one place where bytes become torch tensors and back, and where numbers are rounded."""

from __future__ import annotations

import numpy as np
import torch

from tutti.huggingface.dtypes import Dtype
from tutti.huggingface.tensor_file import Raw


def to_torch(raw: Raw, dtype: Dtype) -> torch.Tensor:
    """Return bytes as a tensor that shares their memory."""
    kind: torch.dtype = getattr(torch, dtype.name)
    if raw.size == 0:
        return torch.empty(raw.shape, dtype=kind)
    flat = torch.from_numpy(np.ascontiguousarray(raw).reshape(-1).view(np.uint8))
    return flat.view(kind).reshape(raw.shape)


def to_raw(tensor: torch.Tensor, dtype: Dtype) -> Raw:
    """Return a tensor's bytes."""
    if tensor.numel() == 0:
        return np.empty(tuple(tensor.shape), dtype.raw)
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().view(dtype.raw).reshape(tuple(tensor.shape))


def cast(raw: Raw, source: Dtype, target: Dtype) -> Raw:
    """Return numbers in another format, rounded to nearest."""
    return to_raw(to_torch(raw, source).to(getattr(torch, target.name)), target)
