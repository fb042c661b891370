"""The kit finds what is planted, and nothing where nothing is wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor

from tutti.accelerator.conformance import Outcome, Report, Verdict, check
from tutti.accelerator.conformance.case import Case, Integers, Values, drawn, laid_out, leaves
from tutti.accelerator.conformance.cases import CASES
from tutti.accelerator.conformance.compare import distance
from tutti.accelerator.conformance.tolerance import UNIT_ROUNDOFF, bound
from tutti.accelerator.devices.cpu import CpuAccelerator
from tutti.accelerator.reference import linear, loss, norm
from tutti.accelerator.registry import Implementation, operator_names, register, unregister
from tutti.errors import InputError

Plant = Callable[..., None]


@pytest.fixture
def plant() -> Iterator[Plant]:
    planted: list[str] = []

    def add(operator: str, function: Callable[..., Any], **options: Any) -> None:
        register(Implementation(operator=operator, name="planted", function=function, **options))
        planted.append(operator)

    yield add
    for operator in planted:
        unregister(operator, "planted")


def of_planted(operator: str) -> tuple[Report, list[Outcome]]:
    report = check(CpuAccelerator(), [operator])
    others = [o for o in report.of(Verdict.FAILED) if o.implementation != "planted"]
    assert not others, others[0]
    return report, [o for o in report.outcomes if o.implementation == "planted"]


def failed(outcomes: list[Outcome], check: str) -> list[Outcome]:
    return [o for o in outcomes if o.verdict is Verdict.FAILED and o.check == check]


# --- what must be found ----------------------------------------------------------------------


def test_a_wrong_number_is_found_and_named(plant: Plant) -> None:
    def off_by_one_row(
        x: Tensor, weight: Tensor | None, *, eps: float, unit_offset: bool = False
    ) -> Tensor:
        y = norm.rms_norm(x, weight, eps=eps, unit_offset=unit_offset)
        return y if x.shape[-1] % 2 == 0 else y * 1.001  # wrong for odd widths alone

    plant("rms_norm", off_by_one_row)
    report, outcomes = of_planted("rms_norm")
    assert not report.passed
    wrong = failed(outcomes, "forward")
    assert {o.case for o in wrong} == {"odd width"}
    assert {o.dtype for o in wrong} >= {"float64", "float32"}
    assert "result is off by" in wrong[0].detail
    assert "expected" in wrong[0].detail


def test_a_wrong_gradient_is_found_though_forward_is_right(plant: Plant) -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return gradients[0] * 0.9

    def broken(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, later: Any = None) -> Any:
        return linear.linear(Wrong.apply(x), weight, bias, later=later)

    plant("linear", broken)
    _, outcomes = of_planted("linear")
    assert not failed(outcomes, "forward")
    wrong = failed(outcomes, "backward")
    assert all(o.detail.startswith("gradient of x") for o in wrong)
    assert len({o.dtype for o in wrong}) == 4
    assert "no tokens" not in {o.case for o in wrong}  # nothing there can be wrong


def test_a_sum_in_half_precision_is_found(plant: Plant) -> None:
    def coarse(tensors: list[Tensor]) -> Tensor:
        total = torch.zeros((), dtype=tensors[0].dtype)
        for tensor in tensors:
            for chunk in tensor.flatten().split(64):
                total = total + chunk.square().sum()
        return total.to(torch.promote_types(total.dtype, torch.float32))

    plant("squared_norm", coarse)
    _, outcomes = of_planted("squared_norm")
    assert {(o.dtype, o.case) for o in failed(outcomes, "forward")} >= {("bfloat16", "large")}
    assert not [o for o in failed(outcomes, "forward") if o.dtype == "float64"]


def test_a_weight_gradient_that_is_not_left_for_later(plant: Plant) -> None:
    def eager(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, later: Any = None) -> Any:
        return linear.linear(x, weight, bias)

    plant("linear", eager)
    _, outcomes = of_planted("linear")
    wrong = failed(outcomes, "backward")
    assert {o.case for o in wrong} == {
        "weight gradient later",
        "weight and bias gradient later",
        "gradients added up",
    }
    assert wrong[0].detail == "the weight's gradient was computed at once, not left for later"


def test_a_result_that_changes_from_call_to_call(plant: Plant) -> None:
    calls = iter(range(1 << 20))

    def restless(tokens: Tensor, table: Tensor, *, later: Any = None) -> Tensor:
        y = linear.embedding(tokens, table, later=later)
        return y * (1 + next(calls) % 2 * UNIT_ROUNDOFF[table.dtype] * 2)

    plant("embedding", restless, deterministic=False)  # which excuses gradients alone
    _, outcomes = of_planted("embedding")
    assert failed(outcomes, "repeat")
    assert not failed(outcomes, "forward")
    assert "result differs when the same call runs again" in failed(outcomes, "repeat")[0].detail


def test_nonsense_and_exceptions_are_failures(plant: Plant) -> None:
    def broken(tokens: Tensor, table: Tensor, *, later: Any = None) -> Tensor:
        if len(tokens) > 100:
            raise ValueError("no more than 100\nplease")
        if len(tokens) == 1:
            return torch.full((1, table.shape[1]), math.nan, dtype=table.dtype)
        return linear.embedding(tokens, table, later=later)[:, :-1]

    plant("embedding", broken)
    _, outcomes = of_planted("embedding")
    details = {o.case: o.detail for o in failed(outcomes, "forward") if o.dtype == "float32"}
    assert details["one token often"] == "ValueError: no more than 100"
    assert "is nan, expected" in details["1 token"]
    assert details["large table"] == "result has shape (64, 15), expected (64, 16)"
    assert details["no tokens"].startswith("result has shape (0, 31)")


def test_a_vocabulary_that_is_not_joined(plant: Plant) -> None:
    def alone(x: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Any:
        if options["vocabulary"] is not None:
            options["vocabulary"] = Deaf(options["vocabulary"].start)
        return loss.linear_cross_entropy(x, weight, targets, **options)

    plant("linear_cross_entropy", alone)
    _, outcomes = of_planted("linear_cross_entropy")
    wrong = [o for o in outcomes if o.verdict is Verdict.FAILED]
    assert {o.case for o in wrong} == {"vocabulary cut in two"}


class Deaf:
    def __init__(self, start: int) -> None:
        self.start = start

    def maximum(self, values: Tensor) -> None:
        pass

    def total(self, values: Tensor) -> None:
        pass


def test_one_rank_that_fails_does_not_hang_the_other(plant: Plant) -> None:
    def uneven(x: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Any:
        vocabulary = options["vocabulary"]
        if vocabulary is not None and vocabulary.start:
            raise ValueError("only the first part")
        return loss.linear_cross_entropy(x, weight, targets, **options)

    plant("linear_cross_entropy", uneven)
    _, outcomes = of_planted("linear_cross_entropy")
    wrong = {o.detail for o in outcomes if o.verdict is Verdict.FAILED}
    assert wrong == {"ValueError: only the first part"}


# --- what must not be held against it --------------------------------------------------------


def test_an_unsupported_call_is_said_with_its_reason(plant: Plant) -> None:
    def only_half(tokens: Tensor, table: Tensor, **_options: Any) -> str | None:
        return None if table.dtype is torch.bfloat16 else "bfloat16 only"

    plant("embedding", linear.embedding, supports=only_half)
    report, outcomes = of_planted("embedding")
    assert report.passed
    assert {o.detail for o in outcomes if o.verdict is Verdict.UNSUPPORTED} == {"bfloat16 only"}
    assert {o.dtype for o in outcomes if o.verdict is Verdict.PASSED} == {"bfloat16"}


def test_an_inference_kernel_is_not_asked_for_gradients(plant: Plant) -> None:
    def forward_only(tokens: Tensor, table: Tensor, *, later: Any = None) -> Tensor:
        assert not torch.is_grad_enabled()
        return linear.embedding(tokens, table)

    plant("embedding", forward_only, exact=False)
    report, outcomes = of_planted("embedding")
    assert report.passed
    assert {o.check for o in outcomes} == {"forward", "repeat"}


def test_an_unknown_operator() -> None:
    with pytest.raises(InputError, match="no operator 'rotray'; did you mean 'rotary'"):
        check(CpuAccelerator(), ["rotray"])


# --- cases, numbers, tolerance ---------------------------------------------------------------


def test_every_operator_has_cases_whose_names_differ() -> None:
    assert {case.operator for case in CASES} == set(operator_names())
    names = [(case.operator, case.name) for case in CASES]
    assert len(names) == len(set(names))
    for operator in set(operator_names()) - {"attention", "attention_with_lse", "squared_norm"}:
        assert any(
            "no tokens" in c.name or "empty" in c.name for c in CASES if c.operator == operator
        )


def test_numbers_are_the_same_every_time_and_rounded() -> None:
    case = Case("linear", "x", (Values((3, 5)), (Values((2,), wide=True), Integers((1, 2)))))
    assert len(leaves(case.arguments)) == 3
    first, second = drawn(case, torch.bfloat16), drawn(case, torch.bfloat16)
    assert [t.dtype for t in first] == [torch.bfloat16, torch.float32, torch.int64]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    other = drawn(Case("linear", "y", case.arguments), torch.bfloat16)
    assert not torch.equal(first[0], other[0])


def test_distinct_numbers_stay_distinct_in_every_dtype() -> None:
    for dtype in UNIT_ROUNDOFF:
        (numbers,) = drawn(Case("route", "x", (Values((7, 256), distinct=True),)), dtype)
        assert all(len(row.unique()) == 256 for row in numbers)


@pytest.mark.parametrize("layout", ["contiguous", "sliced", "heads", "transposed"])
def test_layouts_hold_the_same_numbers(layout: Any) -> None:
    numbers = torch.randn(4, 5, 6)
    placed = laid_out(numbers, layout)
    assert torch.equal(placed, numbers)
    assert placed.is_contiguous() == (layout == "contiguous")


def test_the_tolerance_is_stated_once() -> None:
    assert bound(torch.float64, 1) == 5 * 2.0**-53
    assert bound(torch.bfloat16, 4096) == pytest.approx(4 * 2**-8 + 64 * 2**-24)
    assert list(UNIT_ROUNDOFF.values()) == [torch.finfo(d).eps / 2 for d in UNIT_ROUNDOFF]


def test_distances() -> None:
    ones = torch.ones(100, dtype=torch.float64)
    near = distance("y", ones.float() * (1 + 2**-23), ones, torch.float32, 1)
    assert 0 < near.part < 1
    assert near.detail == ""
    far = ones.clone()
    far[42] = 1.01
    found = distance("y", far.float(), ones, torch.float32, 1)
    assert found.part > 1
    assert "at [42] it is 1.01, expected 1" in found.detail
    assert distance("y", far > 1, ones > 1, torch.float32, 1).part == math.inf
    assert distance("y", (ones > 0), ones, torch.float32, 1).part == math.inf


# --- reports ---------------------------------------------------------------------------------


def small_report() -> Report:
    return Report(
        kind="cpu", chip="CPU", device="cpu", software="torch", seconds=1.5,
        outcomes=(
            Outcome(subject="linear", check="forward", verdict=Verdict.PASSED, dtype="float32"),
            Outcome(
                subject="linear", check="backward", verdict=Verdict.FAILED, detail="a < b & c",
                implementation="x", error=math.inf,
            ),
            Outcome(
                subject="device", check="graph", verdict=Verdict.UNSUPPORTED, detail="no graphs"
            ),
        ),
    )  # fmt: skip


def test_junit_has_a_suite_per_operator() -> None:
    root = ElementTree.fromstring(small_report().junit())
    assert root.attrib["failures"] == "1"
    assert [suite.attrib["name"] for suite in root] == ["linear", "device"]
    failure = root.find("./testsuite/testcase/failure")
    assert failure is not None
    assert failure.attrib["message"] == "a < b & c"
    skipped = root.find("./testsuite/testcase/skipped")
    assert skipped is not None
    assert skipped.attrib["message"] == "no graphs"


def test_json_holds_every_outcome() -> None:
    value = json.loads(json.dumps(small_report().plain(), allow_nan=False))
    assert value["ok"] is False
    assert value["counts"] == {"passed": 1, "failed": 1, "unsupported": 1}
    assert [o["verdict"] for o in value["outcomes"]] == ["passed", "failed", "unsupported"]
    assert value["outcomes"][1]["error"] is None


def test_a_report_of_nothing_does_not_pass() -> None:
    empty = Report(kind="x", chip="x", device="x", software="x", seconds=0, outcomes=())
    assert not empty.passed


def test_not_a_number_is_only_like_itself() -> None:
    nan, one = torch.tensor([1.0, math.nan]), torch.tensor([1.0, 1.0])
    assert distance("y", nan, nan.double(), torch.float32, 1).part == 0.0
    assert distance("y", nan, one.double(), torch.float32, 1).part == math.inf
    assert distance("y", one, nan.double(), torch.float32, 1).part == math.inf
