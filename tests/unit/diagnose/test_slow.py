"""Slow chips are found in a few steps; noise, busy hosts and wrong plans are not taken for them."""

from __future__ import annotations

import random

from tutti.diagnose.slow import FIRST, PAST, SlowRanks, Verdict

DUE = [0.1, 0.1, 0.1, 0.3]


def run(
    slowed: dict[int, list[tuple[int, float]]],
    steps: int,
    *,
    noise: float = 0.05,
    wrong: float = 1.0,
) -> list[Verdict]:
    """Return what is said; `slowed` gives each rank's factor from some step on."""
    chance, watch, found = random.Random(1), SlowRanks(DUE), list[Verdict]()
    for step in range(1, steps + 1):
        took = []
        for rank, due in enumerate(DUE):
            changes = [factor for start, factor in slowed.get(rank, ()) if step >= start]
            factor = changes[-1] if changes else 1.0
            took.append(due * wrong * factor * chance.gauss(1.0, noise))
        found += watch.step(step, took)
    return found


def test_noise_alone_says_nothing() -> None:
    assert run({}, 500) == []


def test_a_chip_that_slows_is_found_within_ten_steps_and_so_is_its_recovery() -> None:
    begins, ends = 60, 200
    found = run({1: [(begins, 1.5), (ends, 1.0)]}, 500)
    assert [(v.rank, v.slow) for v in found] == [(1, True), (1, False)]
    slow, well = found
    assert begins <= slow.step <= begins + 10
    assert ends <= well.step <= ends + 10
    assert abs(slow.factor - 1.5) < 0.15
    assert "its 2 twins do not" in slow.why


def test_one_without_twins_is_judged_by_its_past() -> None:
    found = run({3: [(80, 1.5)]}, 120)
    assert [(v.rank, v.slow) for v in found] == [(3, True)]


def test_a_plan_that_is_wrong_about_all_chips_makes_none_slow() -> None:
    assert run({}, 200, wrong=2.5) == []


def test_what_slows_twins_alike_is_no_chips() -> None:
    assert [v.rank for v in run({r: [(70, 1.6)] for r in (0, 1, 2)}, 150)] == []


def test_the_first_steps_count_for_nothing() -> None:
    watch = SlowRanks([0.1, 0.1])
    for step in range(1, FIRST + 1):
        assert watch.step(step, [9.0, 0.1]) == []
    for step in range(FIRST + 1, FIRST + PAST + 30):
        assert watch.step(step, [0.1, 0.1]) == []
