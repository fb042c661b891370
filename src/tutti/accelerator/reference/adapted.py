"""What adapters add to a product, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from tutti.accelerator.products import linear_product


def adapted_linear(
    y: Tensor, x: Tensor, down: Tensor, up: Tensor, adapters: Tensor, order: Tensor | None = None
) -> Tensor:
    """Return y (T, out) plus up[a]·down[a]·x of each row's adapter a; −1: nothing.

    x (T, in), down (A, R, in), up (A, out, R), adapters (T,). `order` (T,): the rows so that those
    of one adapter stand together, for kernels that work on tiles of rows; it changes no result.
    """
    del order
    for number in range(down.shape[0]):
        added = linear_product(linear_product(x, down[number]), up[number])
        own = (adapters == number).unsqueeze(1)
        y = y + torch.where(own, added, torch.zeros_like(added))
    return y
