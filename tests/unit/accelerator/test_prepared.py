"""Products with weights that were laid out for the host are those with the weights as they are."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tutti.accelerator.operators import Operators  # noqa: E402
from tutti.accelerator.prepared import FEW, MANY, prepare, supports  # noqa: E402

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
