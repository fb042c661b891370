"""Frozen weights in int8 and NF4: what they stand for, and the gradient of what they multiply."""

from __future__ import annotations

import math

import pytest
import torch

from tutti.accelerator import open_accelerator
from tutti.accelerator.quantised import frozen, stacked
from tutti.accelerator.quantised.quantise import NF4_LEVELS
from tutti.nn.quantised import _finer


def weight(out: int = 24, width: int = 96) -> torch.Tensor:
    return torch.randn(out, width, generator=torch.Generator().manual_seed(0)) * 0.1


@pytest.mark.parametrize(("kind", "worst"), [("int8", 0.006), ("nf4", 0.16)])
def test_each_number_is_near_what_it_was(kind, worst):
    wide = weight()
    made = frozen(wide, kind)
    assert made.kind == kind
    assert made.shape == wide.shape
    largest = wide.unflatten(-1, (-1, made.block[1])).abs().amax(-1, keepdim=True)
    error = (made.dequantised(torch.float32) - wide).unflatten(-1, (-1, made.block[1])).abs()
    assert float((error / largest).max()) <= worst


def test_levels_are_reached_exactly_and_zero_is_one_of_them():
    wide = torch.tensor(NF4_LEVELS).repeat(1, 4) * 3.0
    assert torch.equal(frozen(wide, "nf4").dequantised(torch.float32), wide)
    assert 0.0 in NF4_LEVELS


def test_few_bits_take_few_bytes():
    wide = weight(64, 256)
    assert frozen(wide, "nf4").num_bytes == 64 * 256 // 2 + 64 * 4 * 4
    assert frozen(wide, "int8").num_bytes == 64 * 256 + 64 * 2 * 4


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_cut_inside_a_group_changes_no_number(kind):
    made = frozen(weight(), kind)
    columns = slice(48, 96)  # groups are 32 wide
    part = _finer(made, columns).part(slice(0, 24), columns)
    assert torch.equal(part.dequantised(torch.float32), made.dequantised(torch.float32)[:, columns])
    both = stacked([made, made])
    assert torch.equal(both.dequantised(torch.float32)[24:], made.dequantised(torch.float32))


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_products_are_those_of_the_wide_weight_and_so_are_gradients(kind):
    operators = open_accelerator("cpu").operators
    made = frozen(weight(), kind)
    x, same = (torch.ones(5, 96).cumsum(0).requires_grad_() for _ in range(2))
    y = operators.linear(x, made)
    expected = torch.nn.functional.linear(same, made.dequantised(torch.float32))
    assert torch.allclose(y, expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    assert torch.allclose(x.grad, same.grad)


def test_experts_of_few_bits():
    operators = open_accelerator("cpu").operators
    made = frozen(torch.stack([weight(), 2.0 * weight()]), "nf4")
    x = torch.ones(6, 96, requires_grad=True)
    y = operators.grouped_linear(x, made, torch.tensor([2, 4]))
    assert torch.allclose(2.0 * y[0], y[5])
    y.sum().backward()
    assert torch.allclose(2.0 * x.grad[0], x.grad[5])


def test_columns_that_make_no_groups_are_none():
    assert frozen(weight(4, 24), "nf4") is None
    assert math.gcd(24, 16) < 16
