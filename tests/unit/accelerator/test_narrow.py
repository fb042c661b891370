"""Products of 8 bits: scales, rows that are not finite, and what no kernel takes."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tutti.accelerator import open_accelerator
from tutti.accelerator.operators import Operators
from tutti.accelerator.reference.narrow import (
    narrow_grouped_linear,
    narrow_linear,
    narrowed,
    power_of_two_scales,
)
from tutti.accelerator.registry import Implementation, register, unregister


@given(st.floats(2.0**-110, 2.0**120, width=32))
def test_a_scale_is_the_least_power_of_two_that_fits(largest: float) -> None:
    scale = float(power_of_two_scales(torch.tensor([largest])))
    assert math.frexp(scale)[0] == 0.5
    assert 224 < largest / scale <= 448


def test_rounding_is_exact_where_8_bits_are_enough() -> None:
    torch.manual_seed(0)
    x, weight = (torch.randint(-7, 8, shape).float() for shape in ((32, 48), (16, 48)))
    x.requires_grad_()
    weight.requires_grad_()
    gradient = torch.randint(-7, 8, (32, 16)).float()
    found, expected = narrow_linear(x, weight), x @ weight.t()
    assert torch.equal(found, expected)
    for own, other in zip(
        torch.autograd.grad(found, (x, weight), gradient),
        torch.autograd.grad(expected, (x, weight), gradient),
        strict=True,
    ):
        assert torch.equal(own, other)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_shows(bad: float) -> None:
    x = torch.randn(16, 16)
    x[3, 1] = bad
    y = narrow_linear(x, torch.randn(16, 16))
    assert [i for i in range(16) if not y[i].isfinite().all()] == [3]
    assert narrowed(torch.zeros(1, 4)).values.float().eq(0).all()


def test_what_no_kernel_takes_stays_wide_and_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kernel = Implementation(
        operator="narrow_linear", name="odd", function=narrow_linear, devices=("cpu",), rank=5,
        supports=lambda x, weight, bias=None, **options: "no such width",
    )  # fmt: skip
    register(kernel)
    try:
        operators = Operators("cpu", forced={}).narrowed()
        x, weight = torch.randn(4, 16), torch.randn(16, 16)
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                y = operators.linear(x, weight, may_narrow=True)
                assert torch.equal(y, x @ weight.t())
    finally:
        unregister("narrow_linear", "odd")
    assert [record.getMessage() for record in caplog.records] == [
        "fp8: products with weights of 16 × 16 stay wide: no such width"
    ]


def test_only_layers_that_may_be_are_narrow() -> None:
    wide = open_accelerator("cpu").operators
    narrow = wide.narrowed()
    x, weight = torch.randn(4, 16), torch.randn(16, 16)
    plain = x @ weight.t()
    assert torch.equal(narrow.linear(x, weight), plain)
    assert torch.equal(wide.linear(x, weight, may_narrow=True), plain)
    assert not torch.equal(narrow.linear(x, weight, may_narrow=True), plain)


def test_experts_multiply_as_each_alone_would() -> None:
    torch.manual_seed(0)
    counts = [32, 0, 16]
    x, weight = torch.randn(48, 32, requires_grad=True), torch.randn(3, 16, 32, requires_grad=True)
    found = narrow_grouped_linear(x, weight, torch.tensor(counts))
    alone = [narrow_linear(run, weight[e]) for e, run in enumerate(x.split(counts))]
    gradient = torch.randn_like(found)
    assert torch.equal(found, torch.cat(alone))
    for own, other in zip(
        torch.autograd.grad(found, (x, weight), gradient),
        torch.autograd.grad(torch.cat(alone), (x, weight), gradient),
        strict=True,
    ):
        assert torch.equal(own, other)
