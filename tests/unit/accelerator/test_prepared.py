"""Products with weights that were laid out for the host are those with the weights as they are."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tutti.accelerator.operators import Operators  # noqa: E402
from tutti.accelerator.prepared import (  # noqa: E402
    FEW,
    MANY,
    has_halves,
    prepare,
    round_to_halves,
    supports,
)

NARROW = (96, 64)


@pytest.mark.parametrize("shape", [NARROW, (2053, 33)])
@pytest.mark.parametrize("rows", [FEW, 7, MANY])
@pytest.mark.parametrize("bias", [True, False])
def test_products_are_the_same(shape: tuple[int, int], rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(shape), torch.randn(rows, shape[1])
    added = torch.randn(shape[0]) if bias else None
    operators = Operators("cpu", forced={})
    before = operators.linear(x, weight, added)
    assert operators.chosen("linear", x, weight, added, later=None).name == "reference"
    operators.prepare(weight)
    assert operators.chosen("linear", x, weight, added, later=None).name == "prepared"
    torch.testing.assert_close(operators.linear(x, weight, added), before, rtol=1e-5, atol=1e-5)


def test_gradients_go_the_other_way() -> None:
    weight = torch.nn.Parameter(torch.randn(NARROW))
    prepare(weight)
    assert supports(torch.randn(2, 64), weight) == "no gradients"
    with torch.no_grad():
        assert supports(torch.randn(2, 64), weight) is None
        assert supports(torch.randn(2, 64).double(), weight) is not None


def test_halves_change_no_number() -> None:
    """A weight of bfloat16's numbers lies there as halves; products are those in float32."""
    torch.manual_seed(0)
    weight = torch.randn(NARROW).bfloat16().float()
    x, added = torch.randn(7, 64), torch.randn(96)
    expected = x.double() @ weight.double().t() + added.double()
    if not has_halves():
        pytest.skip("this host has no such products")
    prepare(weight, halves=True)
    assert hasattr(weight, "_tutti_halves")
    found = Operators("cpu", forced={}).linear(x, weight, added)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("number", [1.0 + 2**-12, 1e5, 1e-9])
def test_what_is_no_half_stays_as_it_is(number: float) -> None:
    weight = torch.ones(NARROW)
    weight[5, 3] = number
    prepare(weight, halves=True)
    assert not hasattr(weight, "_tutti_halves")
    assert round_to_halves(weight) == (number < 65520)
    if has_halves() and number < 65520:
        prepare(weight, halves=True)
        assert hasattr(weight, "_tutti_halves")
