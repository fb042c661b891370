"""What "reduce" may mean: how an arriving value joins the one that is there."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tutti.errors import InputError, hint


def _sum(there: Tensor, arrived: Tensor) -> Tensor:
    return there.add_(arrived)


def _maximum(there: Tensor, arrived: Tensor) -> Tensor:
    return torch.maximum(there, arrived, out=there)


def _minimum(there: Tensor, arrived: Tensor) -> Tensor:
    return torch.minimum(there, arrived, out=there)


_REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": _sum,
    "max": _maximum,
    "min": _minimum,
}
_BYTES_ONLY = frozenset(
    dtype
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    if (dtype := getattr(torch, name, None)) is not None
)


def find_reduction(name: str, dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    """Return how to combine two tensors of a dtype."""
    if name not in _REDUCTIONS:
        raise InputError(f"reduction '{name}'; {hint(name, _REDUCTIONS)}")
    if dtype in _BYTES_ONLY:
        raise InputError(
            f"reduction '{name}' of {dtype}: such numbers are only moved, not added; "
            "widen them first"
        )
    return _REDUCTIONS[name]
