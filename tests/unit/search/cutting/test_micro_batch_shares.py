"""Micro-batches shared out by the paces that the simulator found."""

from __future__ import annotations

import itertools
import random

import pytest

from tutti.search.cutting.micro_batch_shares import Runner, balanced


def last_end(runners: list[Runner], counts: list[int]) -> float:
    return max(
        runner.start_s + count * runner.pace_s
        for runner, count in zip(runners, counts, strict=True)
    )


def drawn(number: int, sizes: tuple[int, ...]) -> list[Runner]:
    draw = random.Random(number)
    return [
        Runner(
            micro_batches=draw.randint(4, 12), sequences=size, least=draw.randint(1, 3),
            start_s=draw.uniform(0.0, 4.0), pace_s=draw.uniform(0.2, 2.0),
        )
        for size in sizes
    ]  # fmt: skip


@pytest.mark.parametrize("number", range(30))
def test_no_other_share_ends_sooner_where_micro_batches_are_alike(number: int) -> None:
    runners = drawn(number, (2,) * (2 + number % 2))
    found = balanced(runners)
    total = sum(r.micro_batches for r in runners)
    every = itertools.product(*(range(r.least, total + 1) for r in runners))
    best = min(last_end(runners, list(c)) for c in every if sum(c) == total)
    assert sum(found) == total
    assert last_end(runners, found) == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("number", range(30))
def test_unlike_micro_batches_keep_the_batch_and_end_no_later(number: int) -> None:
    runners = drawn(number, random.Random(-number).choice(((8, 4, 4), (3, 2), (6, 4, 1))))
    found = balanced(runners)
    before = [r.micro_batches for r in runners]
    sequences = [sum(n * r.sequences for n, r in zip(c, runners, strict=True))
                 for c in (before, found)]  # fmt: skip
    assert sequences[0] == sequences[1]
    assert last_end(runners, found) <= last_end(runners, before) * (1 + 1e-9)
    assert all(n >= min(r.least, r.micro_batches) for n, r in zip(found, runners, strict=True))


def test_groups_stay_whole() -> None:
    slow = Runner(40, 1, 0.0, 3.0, least=4, together=4)
    fast = Runner(40, 1, 0.0, 1.0, least=4, together=6)
    one, other = balanced([slow, fast])
    assert one + other == 80
    assert (40 - one) % 4 == 0
    assert (other - 40) % 6 == 0
    assert one < 40


def test_one_pipeline_keeps_all() -> None:
    assert balanced([Runner(7, 2, 1.0, 1.0, least=1)]) == [7]
    assert balanced([]) == []
