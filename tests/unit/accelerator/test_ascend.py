"""Ascend's fused operators against a torch_npu that computes as documented and notes its calls."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.support.fake_torch_npu import FAR, FakeTorchNpu
from tutti.accelerator import Segments, ascend
from tutti.accelerator.conformance.call import Alone, run_case
from tutti.accelerator.conformance.case import drawn
from tutti.accelerator.conformance.cases import CASES
from tutti.accelerator.conformance.report import Outcome, Verdict
from tutti.accelerator.conformance.run import check_implementation
from tutti.accelerator.devices.cpu import CpuAccelerator
from tutti.accelerator.registry import REFERENCES, Implementation
from tutti.models.parts import Activation

IMPLEMENTATIONS = {i.operator: i for i in ascend.IMPLEMENTATIONS}
HOST = torch.device("cpu")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTorchNpu:
    module = FakeTorchNpu()
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    return module


def outcomes(operator: str, dtype: torch.dtype) -> list[Outcome]:
    found: list[Outcome] = []
    reference = Implementation(operator=operator, name="r", function=REFERENCES[operator])
    for case in (case for case in CASES if case.operator == operator):
        numbers = drawn(case, dtype)
        expected = run_case(case, Alone("cpu", reference), numbers, HOST, dtype=torch.float64)
        found += check_implementation(
            CpuAccelerator(), IMPLEMENTATIONS[operator], case, dtype, numbers, expected
        )
    return found


@pytest.mark.parametrize("operator", sorted(IMPLEMENTATIONS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_case_it_takes_is_right(
    fake: FakeTorchNpu, operator: str, dtype: torch.dtype
) -> None:
    found = outcomes(operator, dtype)
    wrong = [o for o in found if o.verdict is Verdict.FAILED]
    assert not wrong, f"{wrong[0].case}, {wrong[0].check}: {wrong[0].detail}"
    taken = {o.case for o in found if o.verdict is Verdict.PASSED}
    assert bool(taken) == (
        dtype in (torch.bfloat16, torch.float16)
        or (dtype is torch.float32 and operator not in ("attention", "grouped_linear"))
    )
    assert all(o.detail for o in found if o.verdict is Verdict.UNSUPPORTED)


def test_which_attention_calls_go_through(fake: FakeTorchNpu) -> None:
    taken = {o.case for o in outcomes("attention", torch.bfloat16) if o.verdict is Verdict.PASSED}
    assert taken >= {
        "1 token",
        "packed sequences",
        "grouped queries",
        "tail of a sequence",
        "one new token each",
        "not causal",
        "window, packed",
        "window beyond the length",
    }
    assert not taken & {"soft cap", "sinks", "key bias", "chunks", "unused keys", "latent, small"}


def test_masks_and_lengths(fake: FakeTorchNpu) -> None:
    q = torch.randn(6, 4, 32, dtype=torch.bfloat16)
    k = torch.randn(8, 2, 32, dtype=torch.bfloat16)
    attention = IMPLEMENTATIONS["attention"].function
    tail = Segments((2, 4), (4, 4), (0, 4))
    attention(q, k, k, tail, scale=0.1)
    attention(q, k, k, tail, scale=0.1, causal=False)
    attention(k, k, k, Segments.of_lengths((4, 4)), scale=0.1, window=3)
    attention(k, k, k, Segments.of_lengths((4, 4)), scale=0.1, window=4)
    notes = [options for _, options in fake.calls]
    assert [n["sparse_mode"] for n in notes] == [3, 0, 4, 3]
    assert [n["pre_tockens"] for n in notes] == [FAR, FAR, 2, FAR]
    assert [n["next_tockens"] for n in notes] == [0, FAR, 0, 0]
    assert notes[0]["actual_seq_qlen"] == [2, 6]
    assert notes[0]["actual_seq_kvlen"] == [4, 8]


def test_the_fused_sum_is_for_inference_alone(fake: FakeTorchNpu) -> None:
    supports = IMPLEMENTATIONS["add_rms_norm"].supports
    x = torch.ones(2, 8)
    weight = torch.ones(8, requires_grad=True)
    assert supports(x, x, weight, eps=1e-5, unit_offset=False) == "no gradients"
    with torch.no_grad():
        assert supports(x, x, weight, eps=1e-5, unit_offset=False) is None
    assert supports(x, x, weight.detach(), eps=1e-5, unit_offset=False) is None


def test_tables_are_as_wide_as_the_rotated_part(fake: FakeTorchNpu) -> None:
    x = torch.randn(5, 3, 80)
    table = torch.randn(5, 16)
    IMPLEMENTATIONS["rotary"].function(x, table, table)
    IMPLEMENTATIONS["rotary"].function(x, table, table, interleaved=True)
    assert [options for _, options in fake.calls] == [
        {"rotary_mode": "half", "shape": (1, 5, 1, 32)},
        {"rotary_mode": "interleave", "shape": (1, 5, 1, 32)},
    ]


def test_other_activations_are_refused() -> None:
    supports = IMPLEMENTATIONS["gated_activation"].supports
    assert supports(torch.ones(2, 4), kind=Activation.SILU) is None
    assert supports(torch.ones(2, 4), kind=Activation.GELU) == "SiLU only"


def test_they_run_on_ascend_alone_and_need_its_plug_in() -> None:
    for implementation in ascend.IMPLEMENTATIONS:
        assert implementation.runs_on("npu")
        assert not implementation.runs_on("cpu")
        assert implementation.needs == "torch_npu"
