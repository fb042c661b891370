"""The trace, the table and the JSON of a simulated step."""

from __future__ import annotations

import io
import itertools
import json
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from tests.support.lines import uniform
from tests.support.plans import plans
from tests.unit.simulate.reference import random_costs
from tutti.plan.job import ScheduleKind
from tutti.schedule.schedule import build_schedule
from tutti.simulate import SimulationResult, repeat, simulate
from tutti.simulate.result_document import result_document
from tutti.simulate.table import result_table
from tutti.simulate.trace import trace_text, write_trace

REQUIRED = {
    "M": {"name", "pid", "args"},
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "s": {"name", "cat", "id", "pid", "tid", "ts"},
    "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"},
}


def simulated(plan, seed: int = 0) -> SimulationResult:
    schedule = build_schedule(plan)
    return simulate(schedule, random_costs(schedule, seed))


@settings(max_examples=30)
@given(plans(), st.integers(0, 2**31))
def test_the_trace_is_valid_and_tells_the_same(plan, seed):
    result = simulated(plan, seed)
    events = json.loads(trace_text(result))["traceEvents"]
    for event in events:
        assert REQUIRED[event["ph"]] <= event.keys()
        assert event.get("ts", 0.0) >= 0
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == result.program.size
    assert max(e["ts"] + e["dur"] for e in slices) == pytest.approx(result.step_seconds * 1e6)
    threads = defaultdict(list)
    for event in slices:
        threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in threads.values():  # slices of one thread must not overlap
        ordered = sorted(spans)
        for (_, end), (start, _) in itertools.pairwise(ordered):
            assert start >= end - 1e-6 * end
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert set(threads) <= named


def test_arrows_lead_from_sends_to_receives():
    result = simulated(uniform(3, 4, ScheduleKind.ONE_F_ONE_B))
    events = json.loads(trace_text(result))["traceEvents"]
    places = {(e["pid"], e["tid"], e["ts"]): e["name"] for e in events if e["ph"] == "X"}
    begins = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert len(begins) == 2 * 2 * 4
    assert begins.keys() == ends.keys()
    for key, begin in begins.items():
        end = ends[key]
        assert places[begin["pid"], begin["tid"], begin["ts"]] == "Send"
        assert places[end["pid"], end["tid"], end["ts"]] == "Receive"
        assert abs(begin["pid"] - end["pid"]) == 1
        assert begin["ts"] <= end["ts"]


def test_a_trace_is_written_as_a_file(tmp_path):
    path = tmp_path / "step.json"
    write_trace(path, simulated(uniform(2, 2, ScheduleKind.GPIPE)))
    assert json.loads(path.read_text())["displayTimeUnit"] == "ms"
    assert list(tmp_path.iterdir()) == [path]


@settings(max_examples=30)
@given(plans(), st.integers(0, 2**31))
def test_the_document_is_plain_json_with_all_figures(plan, seed):
    result = simulated(plan, seed)
    document = json.loads(json.dumps(result_document(result), allow_nan=False))
    assert document["step_seconds"] == result.step_seconds
    assert len(document["classes"]) == len(result.program.schedule.classes)
    for found in document["classes"]:
        spent = sum(found["compute_s"].values()) + sum(found["idle_s"].values())
        assert spent == pytest.approx(document["step_seconds"])
        assert found["limit_bytes"] > 0
    assert sum(document["critical_seconds"].values()) == pytest.approx(document["step_seconds"])


def shown(result: SimulationResult, **options: object) -> str:
    console = Console(width=140, file=io.StringIO())
    console.print(result_table(result, **options))
    return console.file.getvalue()


def test_the_table_has_a_row_per_class_and_says_what_is_hidden():
    schedule = build_schedule(uniform(6, 4, ScheduleKind.ONE_F_ONE_B))
    costs = random_costs(schedule, 0)
    result = simulate(schedule, costs)
    text = shown(result, spread=repeat(schedule, costs, runs=3, sigma=0.1))
    assert all(f"stage {s} " in text for s in range(6))
    assert "A800" in text
    assert "80.0 GiB" in text
    assert "(3 runs)" in text
    assert "critical path" in text
    short = shown(result, most=3)
    assert "more classes of ranks" in short
