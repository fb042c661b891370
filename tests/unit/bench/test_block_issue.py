"""Issue times of a profile add up to those of a whole block."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.measured import measured_profile
from tutti.accelerator import open_accelerator
from tutti.bench import block_issue
from tutti.cost.measured.calls import unit_calls
from tutti.cost.measured.chip import MeasuredChip
from tutti.cost.measured.unit import measured_unit, strategy_of
from tutti.hardware.chip import Dtype
from tutti.models import read_config
from tutti.models.operators import Workload

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 96,
    "max_position_embeddings": 128,
}  # fmt: skip


def test_issue_times_add_up_to_a_block_and_seconds_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    known = measured_profile("CPU", Dtype.FP32)
    rows = tuple(replace(row, issue_s=3e-6) for row in known.operators)
    known = replace(known, operators=rows)
    spec = read_config(CONFIG, "small")
    taken = iter([2e-3, 7e-3])  # forward; both
    ran = []

    def seconds(run, _accelerator):  # type: ignore[no-untyped-def]
        ran.append(run())
        return next(taken)

    monkeypatch.setattr(block_issue, "_issue_s", seconds)
    found = block_issue.with_block_issue(known, spec, open_accelerator("cpu"), Dtype.FP32)
    work = strategy_of(Workload(sequences=1, sequence_length=64))
    unit = measured_unit(MeasuredChip(found, Dtype.FP32), unit_calls(spec, 1, work))
    assert float(unit.issue_forward_s) == pytest.approx(block_issue.IN_A_STEP * 2e-3)
    # sums of tensors have one row, which is a forward one
    assert float(unit.issue_backward_s) == pytest.approx(block_issue.IN_A_STEP * 5e-3, rel=0.06)
    assert [row.seconds for row in found.operators] == [row.seconds for row in known.operators]
    steps = [row.issue_s for row in found.operators if row.operator == "adamw"]
    assert all(issue == 3e-6 for issue in steps)
    assert ran[0].shape == (64, 64)
    assert found.graph_share == 1.0, "a CPU has no graphs"


def test_a_chip_with_graphs_says_what_they_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    chip = open_accelerator("cpu")
    monkeypatch.setattr(type(chip), "graph_pool", lambda self: object())
    known, spec = measured_profile("CPU", Dtype.FP32), read_config(CONFIG, "small")
    monkeypatch.setattr(block_issue, "_issue_s", lambda run, chip: 1e-3)
    found = block_issue.with_block_issue(known, spec, chip, Dtype.FP32)
    assert found.graph_share == block_issue.GRAPH_SHARE < 1.0


def test_the_time_of_a_call_is_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    calls = []

    def run() -> None:
        calls.append(1)
        clock[0] += 0.5 if len(calls) < 8 else 0.25

    monkeypatch.setattr(block_issue.time, "perf_counter", lambda: clock[0])
    assert block_issue._issue_s(run, open_accelerator("cpu")) == 0.25


def test_products_of_8_bits_make_up_for_the_rest_of_their_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known, spec = measured_profile("CPU", Dtype.BF16), read_config(CONFIG, "small")
    rows = [replace(row, issue_s=3e-6) for row in known.operators]
    rows += [replace(r, operator=f"narrow_{r.operator}") for r in rows if "linear." in r.operator]
    known = replace(known, operators=tuple(rows))
    taken = iter([40e-6, 100e-6])  # forward; both
    monkeypatch.setattr(block_issue, "_issue_s", lambda run, chip: (run(), next(taken))[1])
    operators = ("narrow_linear",)
    found = block_issue._of_family(known, spec, open_accelerator("cpu"), Dtype.FP8, operators)
    work = strategy_of(Workload(sequences=1, sequence_length=64))
    unit = measured_unit(MeasuredChip(found, Dtype.FP8), unit_calls(spec, 1, work))
    assert float(unit.issue_forward_s) == pytest.approx(block_issue.IN_A_STEP * 40e-6)
    assert float(unit.issue_backward_s) == pytest.approx(block_issue.IN_A_STEP * 60e-6)
    others = {row.issue_s for row in found.operators if not row.operator.startswith("narrow")}
    assert others == {3e-6}
