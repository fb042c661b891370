"""Adapters on the host: the rows of each adapter that is there are multiplied together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tutti.accelerator import invariant
from tutti.accelerator.products import linear_product
from tutti.accelerator.registry import Implementation, register


def adapted_linear(
    y: Tensor, x: Tensor, down: Tensor, up: Tensor, adapters: Tensor, order: Tensor | None = None
) -> Tensor:
    """Return y plus what each row's adapter adds; y itself if no row has one."""
    del order  # rows are gathered here
    return _each(y, x, down, up, adapters, linear_product)


def unchanging(
    y: Tensor, x: Tensor, down: Tensor, up: Tensor, adapters: Tensor, order: Tensor | None = None
) -> Tensor:
    """Return the same, with the same bits whatever the other rows are."""
    del order
    return _each(y, x, down, up, adapters, invariant.linear)


def _each(
    y: Tensor, x: Tensor, down: Tensor, up: Tensor, adapters: Tensor, multiply: Any
) -> Tensor:
    added_to = y
    for number in torch.unique(adapters).tolist():
        if number < 0:
            continue
        rows = (adapters == number).nonzero().squeeze(1)
        added = multiply(multiply(x[rows], down[number]), up[number])
        added_to = added_to.index_add(0, rows, added)
    return added_to


def _supports(y: Tensor, x: Tensor, *_others: Any) -> str | None:
    if torch.is_grad_enabled() and (y.requires_grad or x.requires_grad):
        return "no gradients"
    return None


register(
    Implementation(
        operator="adapted_linear", name="by-adapter", function=adapted_linear, devices=("cpu",),
        rank=10, supports=_supports, exact=False, asks_host=True,
    ),
    Implementation(
        operator="adapted_linear", name="invariant", function=unchanging, devices=("cpu",),
        rank=-10, supports=_supports, exact=False, asks_host=True, invariant=True,
    ),
)  # fmt: skip
