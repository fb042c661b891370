"""Which programs the bench does not measure again."""

from __future__ import annotations

from tutti.bench.collectives import _hopeless
from tutti.comm.choice import Named

PROGRAMS = [Named(algorithm=name, chunks=1) for name in ("ring", "tree", "leader", "rail")]


def test_what_takes_far_longer_than_the_best_is_left_at_one_sample() -> None:
    assert _hopeless([*PROGRAMS, None], [1.0, 1.7, 1.8, 0.99, 9.0]) == {2}


def test_the_choice_and_gloo_are_always_measured() -> None:
    assert _hopeless([*PROGRAMS, None], [5.0, 1.0, 1.0, 1.0, 5.0]) == set()


def test_short_ones_are_all_measured() -> None:
    assert _hopeless(PROGRAMS, [0.01, 0.1, 0.1, 0.02]) == set()
