"""Generations of an elastic run, read out of its log."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.support.watched_runs import decisions
from tutti.elastic.generations import generations, phases, recoveries
from tutti.elastic.journal import Entry


def entry(at: float, phase: str, generation: int = 1, **more: object) -> Entry:
    return Entry(at=at, generation=generation, phase=phase, why=phase, **more)  # type: ignore[arg-type]


def test_who_took_part_and_how_long_nobody_trained() -> None:
    first, second, third = generations(decisions(begin=100.0))
    assert (first.number, first.step, first.ran, first.left) == (1, 0, 102.0, 130.0)
    assert first.back_s is None
    assert "is silent" in first.why
    assert (second.lost, second.gained, second.back_s) == (("fast/0/1",), (), 2.5)
    assert (third.lost, third.gained, third.back_s) == ((), ("fast/0/1",), 1.0)
    assert third.left is None
    assert third.why == ""
    assert recoveries(decisions()) == [2.5, 1.0]


def test_one_that_never_ran_counts_as_time_without_training() -> None:
    log = [
        entry(0, "entering"), entry(1, "running"), entry(5, "leaving"),
        entry(6, "entering", 2), entry(8, "leaving", 2),
        entry(9, "entering", 3), entry(12, "running", 3), entry(20, "finished", 3),
    ]  # fmt: skip
    found = generations(log)
    assert [one.ran for one in found] == [1, None, 12]
    assert [one.back_s for one in found] == [None, None, 7]
    assert (found[2].left, found[2].over) == (20, "finished")


def test_before_the_first_and_after_the_last() -> None:
    assert generations([entry(0, "waiting", 0)]) == []
    given_up = [entry(0, "entering"), entry(1, "running"), entry(2, "leaving"),
                entry(3, "settling"), entry(9, "given up")]  # fmt: skip
    (only,) = generations(given_up)
    assert (only.left, only.why, only.over) == (2, "leaving", "given up")


def test_phases_have_no_gaps_and_end_now() -> None:
    log = decisions(begin=0.0)
    spans = phases(log, until=100.0)
    assert spans[0].begin == 0
    assert spans[-1].end == 100
    assert all(a.end == b.begin for a, b in pairwise(spans))
    training = sum(one.end - one.begin for one in spans if one.phase == "running")
    assert training == pytest.approx(28 + 27.5 + 39)
    assert phases([], until=5.0) == []
    assert phases([*log, entry(70, "finished", 3)], until=100.0)[-1].end == 70
