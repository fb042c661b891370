"""Weights of 8 and 4 bits: what they stand for, how near it is, and their products."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from tutti.accelerator.conformance import Verdict, check  # noqa: E402
from tutti.accelerator.conformance.cases.quantised import CASES  # noqa: E402
from tutti.accelerator.devices.cpu import CpuAccelerator  # noqa: E402
from tutti.accelerator.host import quantised as host  # noqa: E402
from tutti.accelerator.operators import Operators  # noqa: E402
from tutti.accelerator.quantised import QuantisedWeight, quantise, stacked  # noqa: E402

KINDS = ("fp8", "int8", "int4")


def weight_of(kind: str, out: int = 96, width: int = 256) -> QuantisedWeight:
    generator = torch.Generator().manual_seed(0)
    found = quantise(torch.randn(out, width, generator=generator) * width**-0.5, kind)
    assert found is not None
    return found


def test_an_element_is_code_minus_zero_times_scale() -> None:
    weight = QuantisedWeight(
        codes=torch.tensor([[0x70, 0xF8], [0x12, 0x34]], dtype=torch.uint8),
        scales=torch.tensor([[0.5, 2.0], [1.0, 0.25]]),
        zeros=torch.tensor([[0, 1], [-8, 0]], dtype=torch.int16),
        block=(1, 2),
    )
    expected = [[-4.0, -0.5, -2.0, 12.0], [2.0, 1.0, -1.0, -1.25]]
    assert weight.dequantised(torch.float32).tolist() == expected
    assert weight.shape == (2, 4)
    turned = replace(weight, order=torch.tensor([3, 0, 2, 1]))
    assert turned.dequantised(torch.float32)[:, [3, 0, 2, 1]].tolist() == expected


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_is_to_the_nearest_code(kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    wide = torch.randn(32, 128, generator=generator)
    wide[3] = 0.0
    found = quantise(wide, kind)
    assert found is not None
    apart = (found.dequantised(torch.float32) - wide).abs()
    if kind == "fp8":  # three bits of fraction, or half of the smallest step
        assert (apart <= (wide.abs() / 16).clamp_min(2.0**-10 * found.scales) * 1.001).all()
    else:
        assert (apart <= found.scales.amax(-1, keepdim=True) * 0.5001).all()
    assert not found.dequantised(torch.float32)[3].any()
    assert found.num_bytes <= wide.numel() * {"fp8": 1.1, "int8": 1.1, "int4": 0.6}[kind]


def test_columns_without_groups_stay_wide() -> None:
    assert quantise(torch.randn(8, 40), "int4") is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [0, 1, 9, 200])
def test_products_equal_those_of_what_it_stands_for(kind: str, rows: int) -> None:
    weight, x = weight_of(kind), torch.randn(rows, 256)
    operators = Operators("cpu", forced={})
    assert operators.chosen("quantised_linear", x, weight, None).name == "tiles"
    expected = x.double() @ weight.dequantised(torch.float64).t()
    got = operators.linear(x, weight)  # the same method as for any weight
    assert float((got - expected).abs().max() if rows else 0.0) <= 1e-5


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("rows", [1, 9])
def test_torchs_kernels_in_bfloat16(kind: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "host_multiplies", lambda _dtype: True)
    weight, x = weight_of(kind, out=64), torch.randn(rows, 256).bfloat16()
    operators = Operators("cpu", forced={})
    assert operators.chosen("quantised_linear", x, weight, None).name == "tiles"
    operators.prepare(weight)
    assert operators.chosen("quantised_linear", x, weight, None).name == "packed"
    expected = x.double() @ weight.dequantised(torch.float64).t()
    got = operators.linear(x, weight).double()
    assert float((got - expected).norm() / expected.norm()) < 0.01
    assert operators.chosen("quantised_linear", x.float(), weight, None).name == "tiles"


def test_several_threads_fill_the_same_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 256)
    for kind in KINDS:
        weight = weight_of(kind)
        alone = host.tiles(x, weight)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
        torch.testing.assert_close(host.tiles(x, weight), alone, rtol=1e-6, atol=1e-6)
        monkeypatch.undo()


def test_weights_of_one_input_are_stacked() -> None:
    whole = torch.randn(160, 256)
    parts = [quantise(part, "int4") for part in whole.split([96, 32, 32])]
    both = stacked([part for part in parts if part is not None])
    once = quantise(whole, "int4")
    assert both is not None
    assert once is not None
    assert torch.equal(both.dequantised(torch.float32), once.dequantised(torch.float32))


def test_scales_of_blocks_that_end_in_the_middle_become_rows() -> None:
    blocks = next(case.arguments[1] for case in CASES if "blocks of 128" in case.name)
    both = stacked([blocks, blocks])  # 200 rows are no multiple of 128
    assert both is not None
    assert both.block == (1, 128)
    twice = blocks.dequantised(torch.float32).repeat(2, 1)
    assert torch.equal(both.dequantised(torch.float32), twice)
    assert stacked([weight_of("fp8"), weight_of("int8")]) is None
    turned = replace(weight_of("int8"), order=torch.arange(256))
    assert stacked([weight_of("int8"), turned]) is None


def test_the_batch_changes_no_bit() -> None:
    operators = Operators("cpu", forced={}).as_invariant()
    x = torch.randn(40, 256)
    for kind in KINDS:
        weight = weight_of(kind)
        whole = operators.linear(x, weight)
        assert torch.equal(operators.linear(x[7:8], weight)[0], whole[7])


def test_the_kit_passes_and_finds_a_wrong_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["quantised_linear", "quantised_grouped_linear"]
    assert check(CpuAccelerator(), names).passed
    plain = host._scaling

    def forgets_zeros(weight: QuantisedWeight):
        scales, zeros = plain(weight)
        return scales, zeros[:0]

    monkeypatch.setattr(host, "_scaling", forgets_zeros)
    wrong = check(CpuAccelerator(), names).of(Verdict.FAILED)
    assert wrong
    assert all("zeros" in outcome.case or "4 bits" in outcome.case for outcome in wrong)
