"""No token is lost, invented or shown the way to another document."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.train.data.support import store_of, targets_by_hand
from tutti.errors import InputError
from tutti.train.data.packing import CutRows, FitRows, best_fit
from tutti.train.data.row import NO_TARGET, Row

PAD = 999


@st.composite
def corpora(draw, longest: int = 30):
    """Documents of distinct tokens, and their masks or None."""
    lengths = draw(st.lists(st.integers(0, longest), min_size=1, max_size=25))
    numbers = iter(range(sum(lengths)))
    documents = [[next(numbers) for _ in range(n)] for n in lengths]
    if not any(documents):
        documents[0] = [0]
    masks = None
    if draw(st.booleans()):
        masks = [draw(st.lists(st.booleans(), min_size=len(d), max_size=len(d))) for d in documents]
    return documents, masks


def check_shape(row: Row, length: int) -> None:
    assert row.tokens.shape == row.targets.shape == (length,)
    assert row.tokens.dtype == row.targets.dtype == np.int64
    assert sum(row.lengths) == length
    assert min(row.lengths) > 0
    ends = np.cumsum(row.lengths)[:-1] - 1
    assert (row.targets[ends] == NO_TARGET).all()


@given(corpora(), st.integers(1, 40))
def test_cutting_keeps_every_token_and_target(corpus, length: int) -> None:
    documents, masks = corpus
    rows = CutRows(store_of(documents, masks), length, pad=PAD, vocabulary=1000)
    made = [rows.row(i) for i in range(rows.num_rows)]
    for row in made:
        check_shape(row, length)
    tokens = np.concatenate([row.tokens for row in made]).tolist()
    targets = np.concatenate([row.targets for row in made]).tolist()
    wanted = [token for document in documents for token in document]
    expected = [
        target
        for i, document in enumerate(documents)
        for target in targets_by_hand(document, masks and masks[i])
    ]
    assert tokens[: len(wanted)] == wanted
    assert targets[: len(wanted)] == expected
    assert set(tokens[len(wanted) :]) <= {PAD}
    assert set(targets[len(wanted) :]) <= {NO_TARGET}
    assert rows.report.padding == len(tokens) - len(wanted) < length


@given(corpora(), st.integers(1, 40))
def test_documents_of_a_cut_row_are_those_of_the_source(corpus, length: int) -> None:
    documents, _ = corpus
    owner = {token: i for i, document in enumerate(documents) for token in document}
    rows = CutRows(store_of(documents), length, pad=PAD, vocabulary=1000)
    for index in range(rows.num_rows):
        row = rows.row(index)
        parts = np.split(row.tokens, np.cumsum(row.lengths)[:-1])
        owners = [{owner.get(int(token), "padding") for token in part} for part in parts]
        assert all(len(own) == 1 for own in owners)
        assert len(set.union(*owners)) == len(owners)


@given(corpora(), st.integers(2, 40), st.sampled_from(["truncate", "drop"]))
def test_fitting_keeps_examples_whole(corpus, length: int, long: str) -> None:
    documents, masks = corpus

    def has_loss(i: int) -> bool:
        return masks is None or any(masks[i][1:length])

    whole = [i for i, d in enumerate(documents) if 0 < len(d) <= length]
    cut = [i for i, d in enumerate(documents) if len(d) > length]
    cut = [i for i in cut if has_loss(i)] if long == "truncate" else []
    store = store_of(documents, masks)
    if not whole and not cut:
        with pytest.raises(InputError, match="examples fits a row of"):
            FitRows(store, length, pad=PAD, vocabulary=1000, long=long)
        return
    rows = FitRows(store, length, pad=PAD, vocabulary=1000, long=long)
    found = Counter()
    for index in range(rows.num_rows):
        row = rows.row(index)
        check_shape(row, length)
        edges = np.cumsum(row.lengths)[:-1]
        pairs = zip(np.split(row.tokens, edges), np.split(row.targets, edges), strict=True)
        for tokens, targets in pairs:
            if tokens[0] == PAD:
                assert set(tokens) == {PAD}
                assert set(targets) == {NO_TARGET}
                continue
            found[tuple(tokens.tolist()), tuple(targets.tolist())] += 1
    expected = Counter(
        (
            tuple(documents[i][:length]),
            tuple(targets_by_hand(documents[i][:length], masks and masks[i][:length])),
        )
        for i in (*whole, *cut)
    )
    assert found == expected
    report = rows.report
    assert (report.truncated, report.rows) == (len(cut), rows.num_rows)
    assert report.dropped == len(documents) - len(whole) - len(cut)
    assert report.tokens + report.padding == rows.num_rows * length


@given(st.lists(st.integers(1, 50), min_size=1, max_size=200), st.integers(50, 80))
def test_best_fit_uses_few_rows(sizes: list[int], length: int) -> None:
    groups = best_fit(np.asarray(sizes), length)
    assert sorted(i for group in groups for i in group) == list(range(len(sizes)))
    loads = [sum(sizes[i] for i in group) for group in groups]
    assert max(loads) <= length
    assert len(groups) == 1 or sum(sorted(loads)[:2]) > length  # no two rows fit together


def test_long_examples_can_be_an_error() -> None:
    store = store_of([[1, 2, 3], [4] * 9])
    with pytest.raises(InputError, match=r"1 of 2 examples are longer than a row of 4.*has 9"):
        FitRows(store, 4, pad=0, vocabulary=10, long="error")


def test_tokens_beyond_the_vocabulary_are_refused() -> None:
    with pytest.raises(InputError, match="made: row 0: token 70 is not in the model's vocabulary"):
        CutRows(store_of([[1, 70, 3]]), 3, pad=0, vocabulary=64).row(0)
    rows = FitRows(store_of([[1], [70, 3]]), 3, pad=0, vocabulary=64, long="drop")
    with pytest.raises(InputError, match="example 1: token 70"):
        rows.row(0)
