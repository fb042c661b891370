"""Whether a device's operators multiply in 8 bits, and what they cannot."""

from __future__ import annotations

import copy
import logging
from typing import Self

import torch
from torch import Tensor

from tutti.accelerator.registry import Implementation

log = logging.getLogger(__name__)


class Narrowing:
    """Operators that may multiply in 8 bits where a layer allows it."""

    _candidates: dict[str, list[Implementation]]

    def __init__(self) -> None:
        self.narrow = False
        self._told: set[tuple[int, ...]] = set()

    def narrowed(self) -> Self:
        """Return the same operators with products of 8 bits."""
        narrowed = copy.copy(self)
        narrowed.narrow = True
        return narrowed

    def emulated(self, dtype: torch.dtype, device: torch.device) -> set[str]:
        """Return the products of 8 bits that the device has no kernel for, beside this dtype."""
        rows = torch.zeros(64, 64, dtype=dtype, device=device)
        others = (rows.unsqueeze(0), torch.tensor([64], device=device))
        calls = {"narrow_linear": (rows, rows), "narrow_grouped_linear": (rows, *others)}
        firsts = {operator: self._candidates[operator][0] for operator in calls}
        return {
            operator
            for operator, first in firsts.items()
            if first.name == "reference" or first.supports(*calls[operator]) is not None
        }

    def narrows(self, operator: str, x: Tensor, weight: Tensor, *others: Tensor | None) -> bool:
        """Tell whether a product is made in 8 bits; one that should be and is not is said once.

        The device's own kernel must take it; a device without one emulates all of them.
        """
        if not self.narrow:
            return False
        first = self._candidates[operator][0]
        reason = None if first.name == "reference" else first.supports(x, weight, *others)
        shape = tuple(weight.shape)
        if reason is not None and shape not in self._told:
            self._told.add(shape)
            sizes = " × ".join(map(str, shape))
            log.warning("fp8: products with weights of %s stay wide: %s", sizes, reason)
        return reason is None
