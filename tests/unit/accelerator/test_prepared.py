"""Products with weights that were laid out for the host are those with the weights as they are."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tutti.accelerator.operators import Operators  # noqa: E402
from tutti.accelerator.prepared import (  # noqa: E402
    MANY,
    PATIENCE,
    has_halves,
    is_in_halves,
    panels_of,
    prepare,
    round_to_halves,
    supports,
)

NARROW = (96, 64)


@pytest.mark.parametrize("shape", [NARROW, (2053, 33)])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 9, 11, 12, 13, 17, 31, MANY - 1, MANY])
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
    assert rows >= MANY or panels_of(weight, now=True) is not None
    torch.testing.assert_close(operators.linear(x, weight, added), before, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_numbers_of_16_bits_lie_in_16_bits(kind: torch.dtype) -> None:
    """Every number of the format, the smallest too, and what comes of it."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(kind)
    every = every[torch.isfinite(every)].float()
    weight = every[: every.numel() // 64 * 64].view(-1, 64) / 2.0**12  # sums stay finite
    weight = weight.to(kind).float()
    prepare(weight, halves=kind is torch.float16)
    panels = panels_of(weight, now=True)
    assert panels is not None
    assert panels.itemsize == 2
    x = torch.eye(64)
    found = Operators("cpu", forced={}).linear(x, weight)
    smallest = torch.finfo(torch.float32).tiny  # below, some processors have nothing
    torch.testing.assert_close(found, weight.t().contiguous(), rtol=0, atol=smallest)


def test_bfloat16_is_multiplied_in_float32() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(NARROW).bfloat16(), torch.randn(7, 64).bfloat16()
    expected = (x.double() @ weight.double().t()).bfloat16()
    prepare(weight)
    assert panels_of(weight, now=True) is not None
    found = Operators("cpu", forced={}).linear(x, weight)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-7)


def test_panels_are_made_for_who_stays_and_anew_for_what_changed() -> None:
    operators, weight, x = Operators("cpu", forced={}), torch.ones(NARROW), torch.ones(2, 64)
    operators.prepare(weight)
    for _ in range(PATIENCE):
        assert (operators.linear(x, weight) == 64.0).all()
    weight.mul_(2.0)  # nobody has looked at it in another form yet
    assert (operators.linear(x, weight) == 128.0).all()
    weight.mul_(2.0)
    operators.prepare(weight)
    assert panels_of(weight, now=True) is not None
    assert (operators.linear(x, weight) == 256.0).all()


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
    assert is_in_halves(weight)
    assert panels_of(weight, now=True) is not None
    found = Operators("cpu", forced={}).linear(x, weight, added)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("number", [1.0 + 2**-12, 1e5, 1e-9])
def test_what_is_no_half_stays_as_it_is(number: float) -> None:
    weight = torch.ones(NARROW)
    weight[5, 3] = number
    prepare(weight, halves=True)
    assert not is_in_halves(weight)
    assert round_to_halves(weight) == (number < 65520)
    if has_halves() and number < 65520:
        prepare(weight, halves=True)
        assert is_in_halves(weight)
