"""Does a device multiply right? A product and its gradients, held against random projections.

Wrong products happen without an error: a library that miscounts the processors it may use, a chip
that is about to die. To see it no second product is needed: whatever v is, (x·Wᵀ)·v must be
x·(Wᵀ·v), which takes two products with a vector (Freivalds' check). With random signs in v a tile
of wrong numbers shows in each of its rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from tutti.accelerator.accelerator import Accelerator

FAR = 0.05  # of what rows come to: fifty times what bf16 rounds off, half of what one tile does
MOST_ELEMENTS = 1 << 27  # of a matrix that is checked: heads are larger, and made of such products
ROWS_OF_A_HOST = 256  # a CPU takes its time


class Product(NamedTuple):
    """x·Wᵀ of so many rows of x, each as wide as `inner`, and so many rows of W."""

    rows: int
    inner: int
    columns: int


def wrong_product(
    accelerator: Accelerator, products: Iterable[Product], dtype: torch.dtype
) -> str | None:
    """Return which of the products, or of their gradients, is wrong, and how much of it."""
    device = accelerator.device
    most = ROWS_OF_A_HOST if device.type == "cpu" else 1 << 13
    for product in sorted(set(products)):
        if product.inner * product.columns > MOST_ELEMENTS:
            continue
        rows = min(product.rows, most)
        generator = torch.Generator().manual_seed(rows + product.inner + product.columns)
        x = torch.randn(rows, product.inner, generator=generator).to(device, dtype)
        w = torch.randn(product.columns, product.inner, generator=generator).to(device, dtype)
        g = torch.randn(rows, product.columns, generator=generator).to(device, dtype)
        x.requires_grad_()
        w.requires_grad_()
        y = accelerator.operators.linear(x, w)
        dx, dw = torch.autograd.grad(y, (x, w), g)
        x, w = x.detach(), w.detach()
        for name, made, left, right in (
            ("x·Wᵀ", y.detach(), x, w.t()),
            ("the gradient of x", dx, g, w),
            ("the gradient of W", dw, g.t(), x),
        ):
            wrong = _wrong_rows(made, left, right, generator)
            if wrong:
                size = " × ".join(f"{n:,}" for n in (rows, product.inner, product.columns))
                return f"{name} of {size} in {dtype} is wrong in {wrong:.1%} of its rows"
    return None


def _wrong_rows(product: Tensor, left: Tensor, right: Tensor, generator: torch.Generator) -> float:
    """Return the share of rows that are not those of left·right."""
    signs = (
        torch.randint(0, 2, (right.shape[1],), generator=generator).to(product.device) * 2.0 - 1.0
    )
    expected = left.float() @ (right.float() @ signs)
    apart = (product.float() @ signs - expected).abs()
    scale = expected.square().mean().sqrt().clamp_min(1e-30)
    return float((~(apart <= FAR * scale)).float().mean())  # what is no number is wrong
