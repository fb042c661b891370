"""The order of samples: a permutation per epoch, by weight, from the seed alone."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.train.data.support import store_of
from tutti.errors import InputError
from tutti.train.data.order import DataPart, TrainingOrder, ValidationRows, run_dry, split
from tutti.train.data.packing import CutRows
from tutti.train.data.permutation import permuted


def rows_of(count: int, first: int = 0) -> CutRows:
    tokens = [[first + i] for i in range(count)]
    return CutRows(store_of(tokens), 1, pad=0, vocabulary=1 << 16)


def order_of(counts: list[int], weights: list[float], seed: int = 0, holdout: float = 0.0):
    pairs = [
        split(rows_of(count, 1000 * i), seed=seed, number=i, holdout=holdout)
        for i, count in enumerate(counts)
    ]
    held = [part for _, part in pairs if part is not None]
    return TrainingOrder([part for part, _ in pairs], weights), held


def test_a_mixture_that_runs_dry_is_said() -> None:
    order, _ = order_of([10, 1000], [1.0, 1.0])
    (line,) = run_dry(order, 400)  # 200 of each
    assert "its 10 rows are seen 20.0 times" in line
    assert "0.2 times; lower its weight" in line
    assert run_dry(order, 20) == []
    assert run_dry(order_of([10, 12], [1.0, 1.0])[0], 400) == []
    assert run_dry(order_of([10], [1.0])[0], 400) == []


@given(st.integers(1, 700), st.integers(0, 2**63))
def test_a_permutation(size: int, seed: int) -> None:
    assert sorted(permuted(i, size, (seed,)) for i in range(size)) == list(range(size))


def test_permutations_differ_and_look_random() -> None:
    size = 4096
    first, second = ([permuted(i, size, (3, epoch)) for i in range(size)] for epoch in (0, 1))
    assert np.mean(np.asarray(first) == np.asarray(second)) < 0.01
    for order in (first, second):
        assert abs(np.corrcoef(order, np.arange(size))[0, 1]) < 0.05
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05


def test_a_huge_permutation_costs_no_memory() -> None:
    size = 10**12 + 39
    found = {permuted(i, size, (1,)) for i in range(1000)}
    assert len(found) == 1000
    assert max(found) > size // 2
    with pytest.raises(IndexError):
        permuted(size, size, (1,))


@given(
    st.lists(st.integers(2, 30), min_size=1, max_size=4),
    st.integers(0, 9),
    st.sampled_from([0.0, 0.2]),
)
def test_every_epoch_sees_every_row_once(counts: list[int], seed: int, holdout: float) -> None:
    order, held = order_of(counts, [1.0 + i for i in range(len(counts))], seed, holdout)
    seen: dict[tuple[int, int], list[int]] = {}
    for sample in range(400):
        place = order.place(sample)
        seen.setdefault((place.source, place.epoch), []).append(place.row)
    for (source, epoch), rows in seen.items():
        assert len(rows) == len(set(rows))
        if (source, epoch + 1) in seen:
            kept = {held[source].held(i) for i in range(held[source].count)} if held else set()
            assert set(rows) | kept == set(range(counts[source]))
            assert not set(rows) & kept


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=5))
def test_sources_come_by_weight_evenly(weights: list[float]) -> None:
    order, _ = order_of([20] * len(weights), weights)
    for start, stop in ((0, 2000), (16384 - 500, 16384 + 500)):
        found = Counter(order.place(sample).source for sample in range(start, stop))
        for source, weight in enumerate(weights):
            expected = weight / sum(weights) * (stop - start)
            assert abs(found[source] - expected) <= len(weights) + 2
    total = sum(order.epochs(3000)[i] * 20 for i in range(len(weights)))
    assert round(total) == 3000


@given(st.integers(0, 10**12), st.integers(0, 5), st.sampled_from([1, 2, 4]))
def test_no_plan_changes_the_samples_and_resuming_is_exact(
    first: int, seed: int, ranks: int
) -> None:
    """Ranks that take turns, and a process that starts in the middle, get the same rows."""
    weights = [3.0, 1.0]
    whole, _ = order_of([17, 5], weights, seed)
    expected = [int(whole.row(first + i).tokens[0]) for i in range(8)]
    found: dict[int, int] = {}
    for rank in range(ranks):
        own, _ = order_of([17, 5], weights, seed)
        for i in reversed(range(rank, 8, ranks)):
            found[i] = int(own.row(first + i).tokens[0])
    assert [found[i] for i in range(8)] == expected


def test_seeds_matter() -> None:
    orders = [order_of([50], [1.0], seed)[0] for seed in (0, 1)]
    assert [orders[0].place(i) for i in range(50)] != [orders[1].place(i) for i in range(50)]


def test_validation_rows_end_in_rows_without_a_loss() -> None:
    _, held = order_of([40, 10], [1.0, 1.0], holdout=0.1)
    rows = ValidationRows(held, length=1, pad=7)
    assert rows.num_rows == 5
    assert rows.num_steps(global_batch=4) == 2
    tokens = [int(rows.row(i).tokens[0]) for i in range(5)]
    assert len(set(tokens)) == 5
    blank = rows.row(5)
    assert (blank.tokens.tolist(), blank.targets.tolist(), blank.lengths) == ([7], [-100], (1,))


def test_too_few_rows_to_hold_out() -> None:
    with pytest.raises(InputError, match="made: has 1 row, too few to hold out 10"):
        split(rows_of(1), seed=0, number=0, holdout=0.1)


def test_validation_sources_of_their_own_come_in_order() -> None:
    part = DataPart(rows_of(4), seed=0, number=0, first=0, count=4)
    assert [part.held(i) for i in range(4)] == [0, 1, 2, 3]
