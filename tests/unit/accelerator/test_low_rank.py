"""What adapters add to a product: the sum and its gradients, whichever part is written first."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tutti.accelerator.gradients import WeightGradients
from tutti.accelerator.reference.low_rank import UpFactor, add_low_rank, low_rank_linear

TOKENS, WIDTH, OUT, RANK, SCALE = 20, 32, 48, 4, 0.5
EVERY = ((0, 16), (16, 32), (32, 48))
SOME = ((0, 16), (32, 48))  # columns between them have no adapter


def made(layers: tuple[tuple[int, int], ...], dtype: torch.dtype) -> tuple[list[Tensor], list]:
    generator = torch.Generator().manual_seed(3)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    x, weight, gradient = some(TOKENS, WIDTH), some(OUT, WIDTH), some(TOKENS, OUT)
    down = some(RANK * len(layers), WIDTH).requires_grad_()
    ups = [
        UpFactor(
            torch.nn.Parameter(some(stop - start, RANK)), start, stop, RANK * i, RANK * (i + 1)
        )
        for i, (start, stop) in enumerate(layers)
    ]
    return [x.requires_grad_(), weight, gradient, down], ups


def written_out(x: Tensor, weight: Tensor, down: Tensor, ups: list[UpFactor]) -> Tensor:
    whole = weight.clone()
    for up in ups:
        whole[up.start : up.stop] += SCALE * up.weight @ down[up.first : up.last]
    return x @ whole.t()


@pytest.mark.parametrize("layers", [EVERY, SOME], ids=["every column", "some columns"])
def test_a_product_with_adapters_is_that_of_the_sum(layers: tuple[tuple[int, int], ...]) -> None:
    (x, weight, gradient, down), ups = made(layers, torch.float64)
    asked = [x, down, *(up.weight for up in ups)]
    expected = written_out(x, weight, down, ups)
    wanted = torch.autograd.grad(expected, asked, gradient)

    y = low_rank_linear(x, weight, down, ups, SCALE)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(torch.autograd.grad(y, asked, gradient), wanted)

    later = WeightGradients()
    y = low_rank_linear(x, weight, down, ups, SCALE, later)
    y.backward(gradient)
    later.run()
    torch.testing.assert_close(tuple(each.grad for each in asked), wanted)

    given = add_low_rank(x @ weight.t(), x, down, ups, SCALE)
    torch.testing.assert_close(given, expected)


def test_in_half_precision_the_sum_is_rounded_no_more_than_its_parts() -> None:
    (x, weight, _, down), ups = made(EVERY, torch.bfloat16)
    wide = [UpFactor(up.weight.double(), *up[1:]) for up in ups]
    exact = written_out(x.double(), weight.double(), down.double(), wide)
    y = low_rank_linear(x, weight, down, ups, SCALE).double()
    assert (y - exact).abs().max() < 2 * exact.abs().max() * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("layers", [EVERY, SOME], ids=["made as one", "made apart"])
def test_gradients_go_onto_sums_that_are_there(
    layers: tuple[tuple[int, int], ...],
) -> None:
    (x, weight, gradient, down), ups = made(layers, torch.float32)
    later = WeightGradients()
    low_rank_linear(x, weight, down, ups, SCALE, later).backward(gradient)
    low = (x @ down.t() * SCALE).detach().float()
    sums = {id(up.weight): torch.ones(up.weight.shape) for up in ups}
    sums[id(down)] = torch.zeros(down.shape)
    later.run(lambda asked: sums[id(asked)])
    for up in ups:
        rows = gradient[:, up.start : up.stop].float()
        exact = 1.0 + rows.t() @ low[:, up.first : up.last]
        torch.testing.assert_close(sums[id(up.weight)], exact, rtol=1e-5, atol=1e-4)
