"""Products are right and differentiable whether or not the host has the instructions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tutti.accelerator import products


@pytest.fixture(params=[True, False], ids=["native", "widened"])
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param and not products.host_multiplies(torch.bfloat16):
        pytest.skip("this processor has no bf16 instructions")
    monkeypatch.setattr(products, "host_multiplies", lambda _dtype: request.param)
    return bool(request.param)


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("shapes", [((6, 8), (8, 5)), ((3, 6, 8), (3, 8, 5))])
def test_a_product_and_its_gradients_are_rounded_once(
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    a, b = (drawn(*shape, dtype=torch.bfloat16).requires_grad_() for shape in shapes)
    wide_a, wide_b = (x.detach().double().requires_grad_() for x in (a, b))
    y, expected = products.product(a, b), wide_a @ wide_b
    g = drawn(*y.shape, dtype=torch.bfloat16)
    y.backward(g)
    expected.backward(g.double())
    for own, wanted in ((y, expected), (a.grad, wide_a.grad), (b.grad, wide_b.grad)):
        assert own is not None
        assert wanted is not None
        assert own.dtype is torch.bfloat16
        torch.testing.assert_close(own.double(), wanted, rtol=2.0**-8, atol=2.0**-9)


@pytest.mark.usefixtures("native")
def test_a_linear_layer_takes_any_leading_dimensions() -> None:
    x, w, bias = (drawn(*s, dtype=torch.bfloat16) for s in ((2, 3, 8), (5, 8), (5,)))
    y = products.linear_product(x, w, bias)
    wanted = x.double() @ w.double().t() + bias.double()
    torch.testing.assert_close(y.double(), wanted, rtol=2.0**-7, atol=2.0**-7)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("total_dtype", [torch.float32, torch.bfloat16])
def test_products_are_written_and_added(total_dtype: torch.dtype) -> None:
    a, b = drawn(6, 8, dtype=torch.bfloat16), drawn(8, 5, dtype=torch.bfloat16)
    wanted = a.double() @ b.double()
    target = torch.empty(6, 5, dtype=torch.bfloat16)
    products.write_product(target, a, b)
    torch.testing.assert_close(target.double(), wanted, rtol=2.0**-8, atol=2.0**-9)
    total = torch.ones(6, 5, dtype=total_dtype)
    products.add_product(total, a, b)
    torch.testing.assert_close(total.double(), wanted + 1, rtol=2.0**-6, atol=2.0**-6)


def test_a_widened_product_keeps_its_operands_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "host_multiplies", lambda dtype: dtype is torch.float32)
    saved: list[torch.dtype] = []
    a, b = (drawn(4, 4, dtype=torch.bfloat16).requires_grad_() for _ in range(2))
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.dtype) or t, lambda t: t
    ):
        products.product(a, b)
    assert saved == [torch.bfloat16] * 2


@pytest.mark.parametrize(
    ("takes", "vectors", "instructions", "tiles", "expected"),
    [
        (True, True, False, False, False),  # oneDNN takes numbers apart
        (True, True, True, False, True),
        (True, True, False, True, True),
        (True, False, False, False, True),  # aarch64
        (False, True, False, False, False),
    ],
)
def test_what_a_processor_multiplies(
    monkeypatch: pytest.MonkeyPatch,
    takes: bool,
    vectors: bool,
    instructions: bool,
    tiles: bool,
    expected: bool,
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: takes)
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: vectors)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: instructions)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles)
    asked = products.host_multiplies.__wrapped__
    assert asked(torch.bfloat16) is expected
