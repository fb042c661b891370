"""A device that multiplies wrongly is found out, whichever product it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tutti.accelerator import open_accelerator
from tutti.accelerator.arithmetic import Product, wrong_product
from tutti.accelerator.products import product

SIZES = [Product(128, 256, 512), Product(200, 96, 1000)]


class Broken(torch.autograd.Function):
    """A linear layer of which one product leaves a tile as it found it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, which: str, value: float) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.which, ctx.value = which, value
        return Broken.tile(product(x, w.t()), which == "y", value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, w = ctx.saved_tensors
        g = gradients[0]
        dx = Broken.tile(product(g, w), ctx.which == "dx", ctx.value)
        return dx, Broken.tile(product(g.t(), x), ctx.which == "dw", ctx.value), None, None

    @staticmethod
    def tile(found: Tensor, broken: bool, value: float) -> Tensor:
        if broken:
            found[64:96, 32:64] = value
        return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_right_products_pass(dtype: torch.dtype) -> None:
    assert wrong_product(open_accelerator("cpu"), SIZES, dtype) is None


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("which", "named"),
    [("y", "x·Wᵀ of"), ("dx", "the gradient of x of"), ("dw", "the gradient of W of")],
)
def test_one_tile_is_seen(
    monkeypatch: pytest.MonkeyPatch, which: str, named: str, value: float
) -> None:
    accelerator = open_accelerator("cpu")
    monkeypatch.setattr(
        accelerator.operators, "linear", lambda x, w: Broken.apply(x, w, which, value)
    )
    found = wrong_product(accelerator, SIZES, torch.bfloat16)
    assert found is not None
    assert found.startswith(f"{named} 128 × 256 × 512 in torch.bfloat16 is wrong in ")
    share = float(found.split(" wrong in ")[1].split("%")[0]) / 100
    rows = 512 if which == "dw" else 128
    assert 0.3 * 32 / rows < share <= 32 / rows + 1e-3  # the tile's rows, and no others
