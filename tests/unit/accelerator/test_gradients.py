from __future__ import annotations

import pytest
import torch

from tutti.accelerator import WeightGradients
from tutti.accelerator.gradients import accumulate
from tutti.accelerator.operators import Operators


@pytest.mark.parametrize("biased", [False, True])
def test_weight_gradients_left_for_later_are_the_same(biased: bool) -> None:
    operators = Operators("cpu", forced={})
    torch.manual_seed(0)
    x = torch.randn(2, 5, 3, requires_grad=True)
    weight = torch.randn(4, 3, requires_grad=True)
    bias = torch.randn(4, requires_grad=True) if biased else None
    leaves = [x, weight, *([bias] if bias is not None else [])]
    expected = torch.autograd.grad(operators.linear(x, weight, bias).square().sum(), leaves)

    later = WeightGradients()
    operators.linear(x, weight, bias, later=later).square().sum().backward()
    assert weight.grad is None
    assert len(later) == (2 if biased else 1)
    later.run()
    assert len(later) == 0
    for leaf, gradient in zip(leaves, expected, strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, gradient)


def test_they_add_up_as_autograd_does() -> None:
    weight = torch.ones(2, requires_grad=True)
    later = WeightGradients()
    for value in (1.0, 2.0):
        later.defer(weight, lambda value=value: torch.full((2,), value))
    later.run()
    later.defer(weight, lambda: torch.full((2,), 4.0))
    later.run()
    assert weight.grad is not None
    assert weight.grad.tolist() == [7.0, 7.0]


def test_a_frozen_weight_is_not_computed() -> None:
    later = WeightGradients()
    later.defer(torch.ones(2), lambda: pytest.fail("computed"))
    later.run()
    assert len(later) == 0


def test_a_gradient_takes_the_weights_dtype_and_shape() -> None:
    weight = torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)
    accumulate(weight, torch.ones(6))
    assert weight.grad is not None
    assert weight.grad.dtype is torch.bfloat16
    assert weight.grad.shape == (2, 3)


def test_without_gradients_nothing_is_left() -> None:
    later = WeightGradients()
    with torch.no_grad():
        Operators("cpu", forced={}).linear(torch.ones(1, 2), torch.ones(2, 2), later=later)
    assert len(later) == 0
