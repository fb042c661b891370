"""Where a step goes: the parts add up, and a wait is the network's only as long as it should be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from hypothesis import given
from hypothesis import strategies as st

from tutti.schedule.instruction import Instruction, Op, What
from tutti.train.engine import recorder as module
from tutti.train.engine.recorder import Recorder

LIST = [
    Instruction(Op.FETCH, 0, what=What.BATCH),
    Instruction(Op.RECEIVE, 0, 1, 1, What.ACTIVATIONS),
    Instruction(Op.FORWARD, 0, 1, 3),
    Instruction(Op.OFFLOAD, 0, 1, 3, What.ACTIVATIONS),
    Instruction(Op.REDUCE_GRADIENTS, start=1, stop=3),
    Instruction(Op.STEP),
]
FETCH, RECEIVE, FORWARD, OFFLOAD, REDUCE, STEP = range(6)
CPU: Any = SimpleNamespace(device=SimpleNamespace(type="cpu"), counts_memory=False)


class Clock:
    """A clock that stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def time(self) -> float:
        return 5000.0 + self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


def begun(clock: Clock, expected: list[float]) -> Recorder:
    made = Recorder(LIST, CPU)
    made.expect(expected)
    made.begin_step()
    return made


def waits(recorder: Recorder, clock: Clock, index: int, seconds: float) -> None:
    since = clock.now
    clock.now += seconds
    recorder.waited(index, since)


def runs(recorder: Recorder, clock: Clock, index: int, seconds: float) -> None:
    recorder.start(index)
    clock.now += seconds
    recorder.issued(index)


def test_every_second_has_a_name(clock: Clock) -> None:
    own = begun(clock, [0, 0.25, 0, 0, 0.5, 0])
    runs(own, clock, FETCH, 0.0)
    waits(own, clock, FETCH, 0.5)  # the data are late
    runs(own, clock, RECEIVE, 0.0)
    waits(own, clock, RECEIVE, 1.0)  # a quarter of it is the transfer
    runs(own, clock, FORWARD, 2.0)
    runs(own, clock, OFFLOAD, 0.125)
    runs(own, clock, REDUCE, 0.0)
    waits(own, clock, REDUCE, 0.25)  # shorter than it should take: hidden behind something else
    runs(own, clock, STEP, 1.0)
    clock.now += 0.375
    own.end_step()
    found = own.times()
    assert found.data_s == 0.5
    assert found.communication_s == 0.25 + 0.25
    assert found.bubble_s == 0.75
    assert found.compute_s == 3.0
    assert found.copy_s == 0.125
    assert found.other_s == 0.375
    assert found.step_s == 5.25
    spans = own.spans()
    assert spans.began == 5100.0
    assert (spans.start[FORWARD], spans.end[FORWARD]) == (1.5, 3.5)
    assert (spans.start[RECEIVE], spans.end[RECEIVE]) == (0.5, 1.5)


def test_a_step_forgets_the_one_before(clock: Clock) -> None:
    own = begun(clock, [0.0] * 6)
    waits(own, clock, RECEIVE, 3.0)
    own.end_step()
    assert own.times().bubble_s == 3.0
    own.begin_step()
    clock.now += 1.0
    own.end_step()
    found = own.times()
    assert (found.bubble_s, found.step_s) == (0.0, 1.0)


@given(
    spent=st.lists(st.tuples(st.sampled_from(range(6)), st.booleans(), st.floats(0, 10))),
    expected=st.lists(st.floats(0, 5), min_size=6, max_size=6),
)
def test_parts_add_up_to_the_step(
    spent: list[tuple[int, bool, float]], expected: list[float]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock()
        patch.setattr(module, "time", clock)
        own = begun(clock, expected)
        ran: set[int] = set()
        for index, waiting, seconds in spent:
            computes = index in (FORWARD, STEP)
            if waiting and not computes:
                waits(own, clock, index, seconds)
            elif index not in ran:
                ran.add(index)
                runs(own, clock, index, seconds)
        own.end_step()
        found = own.times()
    parts = (found.compute_s, found.communication_s, found.bubble_s, found.copy_s, found.data_s,
             found.other_s)  # fmt: skip
    assert all(part >= 0 for part in parts)
    assert sum(parts) == pytest.approx(found.step_s, abs=1e-9)


class Chip:
    """A chip that works off what the host gives it, in order."""

    counts_memory = False
    device = SimpleNamespace(type="cuda")

    def __init__(self, clock: Clock) -> None:
        self.clock, self.free = clock, clock.now

    def works(self, seconds: float) -> None:
        self.free = max(self.free, self.clock.now) + seconds

    def event(self, *, timed: bool) -> Any:
        assert timed
        found = SimpleNamespace(at=0.0, synchronize=lambda: None)
        found.record = lambda: setattr(found, "at", max(self.free, self.clock.now))
        found.seconds_since = lambda earlier: found.at - earlier.at
        return found


def test_a_host_that_runs_ahead_waits_for_nothing_that_the_chip_does_not(clock: Clock) -> None:
    chip: Any = Chip(clock)
    own = Recorder(LIST, chip)
    own.expect([0, 0.25, 0, 0, 0, 0])
    own.begin_step()
    waits(own, clock, RECEIVE, 1.0)  # the chip has nothing to do yet
    own.start(FORWARD)
    chip.works(3.0)
    own.issued(FORWARD)
    waits(own, clock, REDUCE, 2.5)  # the chip is busy all along
    waits(own, clock, OFFLOAD, 1.0)  # for half of this it is not
    own.start(STEP)
    chip.works(1.0)
    own.issued(STEP)
    clock.now = chip.free
    own.end_step()
    found = own.times()
    assert found.compute_s == 4.0
    assert (found.communication_s, found.other_s) == (0.25, 0.0)
    # what kept the chip waiting before a pass is shared out by how long the host waited for each
    assert found.copy_s == pytest.approx(0.5 * 1.0 / 3.5)
    assert found.bubble_s == pytest.approx(0.75 + 0.5 * 2.5 / 3.5)
    assert found.step_s == 5.5
