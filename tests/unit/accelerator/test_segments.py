from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tutti.accelerator import Segments
from tutti.errors import InputError

lengths = st.lists(st.integers(1, 9), min_size=1, max_size=6)


@given(lengths)
def test_whole_sequences(own: list[int]) -> None:
    segments = Segments.of_lengths(own)
    assert len(segments) == len(own)
    assert segments.num_queries == sum(own)
    assert segments.keys_follow
    assert segments.is_batch == (len(set(own)) == 1)
    assert segments.query_starts == segments.key_starts
    assert segments.positions().tolist() == [i for n in own for i in range(n)]
    queries, keys = segments.boundaries("cpu")
    assert queries.tolist() == keys.tolist()
    assert queries[-1] == sum(own)
    assert queries.dtype == torch.int32


def test_a_batch() -> None:
    assert Segments.batch(2, 5) == Segments.of_lengths((5, 5))
    assert Segments.batch(2, 5).is_batch


def test_the_tail_of_a_sequence_knows_its_positions() -> None:
    tail = Segments((2, 1), (5, 3), (0, 5))
    assert tail.positions().tolist() == [3, 4, 2]
    assert not tail.is_batch
    assert tail.keys_follow
    assert not Segments((2, 1), (5, 3), (0, 4)).keys_follow


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (((1, 2), (1,), (0,)), "2 runs of queries, 1 of keys and 1 starts; give as many of each"),
        (((3,), (2,), (0,)), "3 queries on 2 keys; each query needs a key of its own"),
        (((0,), (2,), (0,)), "0 queries on 2 keys"),
    ],
)
def test_runs_that_do_not_fit(parts: tuple[tuple[int, ...], ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Segments(*parts)
