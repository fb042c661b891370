"""Max-min shares: nothing wasted, nobody better off at a slower one's expense."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tutti.fabric.rounds import _fair
from tutti.fabric.shares import fair_paces, fair_rates

PATHS = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True), min_size=1,
                 max_size=30)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(paths=PATHS, rates=st.lists(st.floats(0.5, 8.0), min_size=6, max_size=6))
def test_compiled_shares_are_those_of_the_plain_loop(
    paths: list[list[int]], rates: list[float]
) -> None:
    table = np.full((len(paths), 4), -1, dtype=np.int32)
    for row, path in enumerate(paths):
        table[row, : len(path)] = path
    found = fair_rates(table, np.array(rates))
    plain = _fair([tuple(path) for path in paths], dict(enumerate(rates)))
    assert found == pytest.approx(plain, rel=1e-9)
    load = np.zeros(6)
    for path, rate in zip(paths, found, strict=True):
        load[path] += rate
    assert (load <= np.array(rates) * (1 + 1e-9)).all()
    for path, rate in zip(paths, found, strict=True):  # each has a full link where it is fastest
        assert any(
            load[link] >= rates[link] * (1 - 1e-9)
            and all(other <= rate * (1 + 1e-9)
                    for one, other in zip(paths, found, strict=True) if link in one)
            for link in path
        )  # fmt: skip


def test_weights_count_and_a_task_has_one_pace() -> None:
    # two tasks: one loads link 0 twice as much, and is held up at link 1
    offsets, links = np.array([0, 2, 3]), np.array([0, 1, 0], dtype=np.int32)
    paces = fair_paces(offsets, links, np.array([2.0, 1.0, 1.0]), np.array([10.0, 2.0]))
    assert paces.tolist() == [2.0, 6.0]
    assert fair_paces(np.array([0, 0]), links[:0], np.zeros(0), np.ones(2)).tolist() == [np.inf]
    dead = fair_paces(np.array([0, 1]), links[:1], np.ones(1), np.array([0.0]))
    assert dead.tolist() == [0.0]


def test_small_weights_on_fast_links_are_not_lost() -> None:
    offsets = np.arange(5, dtype=np.int64)
    found = fair_paces(offsets, np.zeros(4, dtype=np.int32), np.full(4, 1e-3), np.array([4e11]))
    assert found == pytest.approx(np.full(4, 1e14))
