"""Fused operators of torch_npu, registered when the first Ascend device is opened."""

from __future__ import annotations

from tutti.accelerator.ascend import attention, experts, pointwise
from tutti.accelerator.registry import register

_done = False
IMPLEMENTATIONS = (
    *pointwise.IMPLEMENTATIONS,
    *attention.IMPLEMENTATIONS,
    *experts.IMPLEMENTATIONS,
)


def register_all() -> None:
    """Register every implementation, once."""
    global _done
    if not _done:
        _done = True
        register(*IMPLEMENTATIONS)
