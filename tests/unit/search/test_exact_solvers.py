"""The inner solvers against exhaustive enumeration."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti.search.partition import StageCosts, partition
from tutti.search.shares import split

NUMBERS = st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0, 7.0, 0.1])


@st.composite
def stages(draw):
    num_units, num_stages = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    found = []
    for _ in range(num_stages):
        scale = draw(NUMBERS)
        seconds = [scale * draw(NUMBERS) for _ in range(num_units)]
        sizes = [draw(NUMBERS) for _ in range(num_units)]
        limit = draw(st.sampled_from([float("inf"), 3.0, 6.0, 12.0]))
        found.append(
            StageCosts(
                seconds=np.array(seconds),
                bytes=np.array(sizes),
                fixed_bytes=draw(st.sampled_from([0.0, 1.0])),
                limit_bytes=limit,
            )
        )
    return found


def exhaustive(given_stages):
    """The best (slowest, sum) over all cuts, or None."""
    num_units = len(given_stages[0].seconds)
    best = None
    for inner in itertools.combinations(range(1, num_units), len(given_stages) - 1):
        bounds = [0, *inner, num_units]
        cuts = list(itertools.pairwise(bounds))
        fits = all(
            s.fixed_bytes + s.bytes[a:b].sum() <= s.limit_bytes * (1 + 1e-9)
            for s, (a, b) in zip(given_stages, cuts, strict=True)
        )
        if not fits:
            continue
        times = [s.seconds[a:b].sum() for s, (a, b) in zip(given_stages, cuts, strict=True)]
        key = (round(max(times), 9), round(sum(times), 9))
        best = key if best is None or key < best else best
    return best


@given(stages())
def test_the_partition_is_the_best_of_all(given_stages):
    found = partition(given_stages)
    best = exhaustive(given_stages)
    if best is None:
        assert found is None
        return
    assert found is not None
    assert found.slowest == pytest.approx(best[0], abs=1e-6)
    assert sum(found.seconds) == pytest.approx(best[1], abs=1e-6)
    assert found.cuts[0][0] == 0
    assert found.cuts[-1][1] == len(given_stages[0].seconds)
    assert all(a[1] == b[0] for a, b in itertools.pairwise(found.cuts))


def test_3_to_1_chips_take_6_and_2_of_8_layers():
    fast = StageCosts(seconds=np.full(8, 1.0), bytes=np.zeros(8))
    slow = StageCosts(seconds=np.full(8, 3.0), bytes=np.zeros(8))
    assert partition([fast, slow]).cuts == ((0, 6), (6, 8))


def test_memory_moves_the_cut():
    fast = StageCosts(seconds=np.full(8, 1.0), bytes=np.ones(8), limit_bytes=4.0)
    slow = StageCosts(seconds=np.full(8, 3.0), bytes=np.ones(8), limit_bytes=8.0)
    assert partition([fast, slow]).cuts == ((0, 4), (4, 8))
    tight = StageCosts(seconds=np.full(8, 3.0), bytes=np.ones(8), limit_bytes=3.0)
    assert partition([fast, tight]) is None


def test_more_stages_than_units():
    stage = StageCosts(seconds=np.ones(2), bytes=np.ones(2))
    assert partition([stage] * 3) is None


@given(st.data())
def test_shares_are_the_best_of_all(data):
    total, count = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 3))
    least = data.draw(st.integers(0, 1))
    tables = []
    for _ in range(count):
        steps = data.draw(st.lists(NUMBERS, min_size=total, max_size=total))
        table = np.concatenate(([0.0], np.cumsum(steps)))
        fits = data.draw(st.integers(0, total))
        table[fits + 1 :] = np.inf
        tables.append(table)
    found = split(total, tables, least=least)
    best = min(
        (
            max(tables[i][b] for i, b in enumerate(counts))
            for counts in itertools.product(range(least, total + 1), repeat=count)
            if sum(counts) == total
        ),
        default=float("inf"),
    )
    if not np.isfinite(best):
        assert found is None
        return
    assert found is not None
    counts, slowest = found
    assert sum(counts) == total
    assert min(counts) >= least
    assert slowest == pytest.approx(best)
