"""Synthetic rows: the same for ever, and something can be learnt from them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tutti.errors import InputError
from tutti.train.data.synthetic import SyntheticRows


def rows_of(**changes: object) -> SyntheticRows:
    given = {"vocabulary": 32, "length": 64, "document_length": 0, "surprise": 0.2, "seed": 0}
    return SyntheticRows(**{**given, **changes})  # type: ignore[arg-type]


def test_a_row_depends_on_its_number_alone() -> None:
    first, again = rows_of(), rows_of()
    tokens = [first.row(i).tokens.tolist() for i in (5, 3, 1 << 39)]
    assert [again.row(i).tokens.tolist() for i in (5, 3, 1 << 39)] == tokens
    assert tokens[0] != tokens[1]
    assert rows_of(seed=1).row(5).tokens.tolist() != tokens[0]


def test_targets_stay_within_documents() -> None:
    row = rows_of(length=10, document_length=4).row(0)
    assert row.lengths == (4, 4, 2)
    ends = [3, 7, 9]
    assert row.targets[ends].tolist() == [-100] * 3
    others = [i for i in range(10) if i not in ends]
    assert row.targets[others].tolist() == row.tokens[[i + 1 for i in others]].tolist()


@pytest.mark.parametrize("surprise", [0.0, 0.2, 1.0])
def test_the_chain_has_the_entropy_it_says(surprise: float) -> None:
    """Counted pairs of tokens predict held-out rows as well as the floor says, and no better."""
    rows = rows_of(surprise=surprise)
    counts = np.full((32, 32), 1e-3)
    for index in range(4000):
        tokens = rows.row(index).tokens
        np.add.at(counts, (tokens[:-1], tokens[1:]), 1)
    chances = counts / counts.sum(axis=1, keepdims=True)
    later = [rows.row(1 << 20 | i).tokens for i in range(500)]
    loss = -np.mean([np.log(chances[t[:-1], t[1:]]).mean() for t in later])
    assert loss == pytest.approx(rows.floor_nats, abs=0.02)
    assert rows.floor_nats <= math.log(32) + 1e-9
    frequencies = np.bincount(np.concatenate(later), minlength=32) / sum(map(len, later))
    assert frequencies == pytest.approx(1 / 32, abs=0.02)


def test_a_vocabulary_of_one() -> None:
    with pytest.raises(InputError, match="at least 2 tokens"):
        rows_of(vocabulary=1)
