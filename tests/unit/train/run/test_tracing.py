"""Traces of real steps: complete, readable again, with arrows between the ranks that talk."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict

import numpy as np
import pytest

from tests.support.any_plan import PLANS
from tests.support.threads import World
from tests.support.training import batches_of, engine_of, settings
from tutti.errors import InputError
from tutti.plan.plan import Plan
from tutti.ranks.clocks import Offset, best_offset, kernel_name
from tutti.schedule.schedule import build_schedule
from tutti.simulate.measured import MeasuredStep, read_measured, settled, write_measured
from tutti.simulate.program import Kind, Program, compile_schedule
from tutti.train.run.tracing import RankSpans, joined, rank_spans

PLAN = PLANS["three stages, unlike widths"]


def spans_of(plan: Plan) -> list[RankSpans]:
    def one(links) -> RankSpans:
        engine = engine_of(plan, plan.model.spec, links)
        engine.step(batches_of(engine, 0), settings())
        return rank_spans(engine)

    return World(plan.num_ranks).run(one)


@pytest.fixture(scope="module")
def program() -> Program:
    return compile_schedule(build_schedule(PLAN))


@pytest.fixture(scope="module")
def step(program) -> MeasuredStep:
    return settled(program, joined(7, spans_of(PLAN), {kernel_name(): Offset(0.0, 0.0)}))


def test_a_send_is_over_when_it_was_received(program, step):
    """Each ends at the end of the step or at a Receive's end, and none before it began."""
    over = {float(end) for own in step.ranks for end in own.end}
    for own in step.ranks:
        span = program.span(own.rank_class)
        sends = np.flatnonzero(program.kind[span] == Kind.SEND)
        assert (own.end[sends] >= own.start[sends]).all()
        assert {float(end) for end in own.end[sends]} <= over
        assert (own.end[sends] < own.shift_s + own.step_s).all()


def test_a_trace_tells_every_instruction_of_every_rank(program, step, tmp_path):
    path = tmp_path / "trace-step-7.json"
    write_measured(path, program, step)
    written = json.loads(path.read_text())
    slices = [e for e in written["traceEvents"] if e["ph"] == "X"]
    sizes = [len(program.op[program.span(own.rank_class)]) for own in step.ranks]
    assert len(slices) == sum(sizes)
    assert len(step.ranks) == PLAN.num_ranks
    threads = defaultdict(list)
    for event in slices:
        threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in threads.values():  # slices of one thread must not overlap
        for (_, end), (start, _) in itertools.pairwise(sorted(spans)):
            assert start >= end - 1e-3
    named = {(e["pid"], e["tid"]) for e in written["traceEvents"] if e["name"] == "thread_name"}
    assert set(threads) == named
    assert max(e["ts"] + e["dur"] for e in slices) <= step.step_seconds * 1e6 + 1e-3


def test_arrows_lead_from_the_ranks_that_send(program, step, tmp_path):
    path = tmp_path / "trace.json"
    write_measured(path, program, step)
    events = json.loads(path.read_text())["traceEvents"]
    slices = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append(event)

    def hit(arrow) -> str:
        own = slices[arrow["pid"], arrow["tid"]]
        inside = [e for e in own if e["ts"] <= arrow["ts"] + 1e-6 <= e["ts"] + e["dur"] + 1e-3]
        return inside[0]["name"]

    begins = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    receives = sum(event["name"] == "Receive" for own in slices.values() for event in own)
    assert receives == len(begins) == len(ends) > 0
    stages = [program.schedule.classes[own.rank_class].stage for own in step.ranks]
    for key, begin in begins.items():
        assert (hit(begin), hit(ends[key])) == ("Send", "Receive")
        assert abs(stages[begin["pid"]] - stages[ends[key]["pid"]]) == 1


def test_a_trace_is_read_as_it_was_written(program, step, tmp_path):
    path = tmp_path / "trace.json"
    write_measured(path, program, step)
    again = read_measured(path, program)
    assert (again.step, again.clock, again.emulated) == (7, step.clock, False)
    for one, other in zip(again.ranks, step.ranks, strict=True):
        assert (one.rank, one.rank_class, one.pool) == (other.rank, other.rank_class, other.pool)
        np.testing.assert_allclose(one.start, other.start, atol=1e-9)
        np.testing.assert_allclose(one.end, other.end, atol=1e-9)
        np.testing.assert_allclose(one.waited, other.waited, atol=1e-9)
        assert one.parts == other.parts


def test_a_trace_of_another_plan_or_of_nothing_is_refused(program, step, tmp_path):
    path = tmp_path / "trace.json"
    write_measured(path, program, step)
    other = compile_schedule(build_schedule(PLANS["interleaved, tied apart"]))
    with pytest.raises(InputError, match="another plan"):
        read_measured(path, other)
    path.write_text("{}")
    with pytest.raises(InputError, match="no trace"):
        read_measured(path, program)
    with pytest.raises(InputError, match="cannot be read"):
        read_measured(tmp_path / "absent.json", program)


def test_ranks_of_another_host_are_moved_onto_the_first_clock(step):
    ranks = spans_of(PLANS["unequal shares on unlike chips"])
    apart = [
        RankSpans(**{f: getattr(own, f) for f in own.__slots__} | {"kernel": name})
        for own, name in zip(ranks, ("one", "two"), strict=True)
    ]
    late = ranks[1].spans.began - ranks[0].spans.began
    offsets = {"one": Offset(0.0, 0.0), "two": Offset(late - 0.25, 1e-4)}
    found = joined(1, apart, offsets)
    assert found.ranks[1].shift_s - found.ranks[0].shift_s == pytest.approx(0.25, abs=1e-6)
    assert "2 hosts" in found.clock


def test_the_quickest_round_trip_is_believed():
    found = best_offset([(0.0, 5.9, 1.0), (2.0, 7.01, 2.02), (4.0, 9.5, 4.6)])
    assert found.seconds == pytest.approx(5.0)
    assert found.error_s == pytest.approx(0.01)
