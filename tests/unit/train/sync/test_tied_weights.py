"""Who sends which elements of tied weights to whom."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tutti.train.sync.tied_weights import Keeper, Route, routes

SIZE = 30


def keeper(rank: int, pipeline: int, start: int, stop: int) -> Keeper:
    return Keeper((0, "token.weight"), rank, pipeline, start, stop, 0)


def assert_whole(found: list[Route], targets: list[Keeper]) -> None:
    for target in targets:
        own = sorted((r.start, r.stop) for r in found if r.target is target)
        assert [own[0][0], own[-1][1]] == [target.start, target.stop]
        assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(own))
    for route in found:
        assert route.source.start <= route.start < route.stop <= route.source.stop


def test_what_the_own_pipeline_lacks_comes_from_several_ranks_of_another() -> None:
    """A table that is sharded over all pipelines: no single rank elsewhere has all the rest."""
    sources = [keeper(0, 0, 0, 10), keeper(1, 1, 10, 20), keeper(2, 1, 20, 30)]
    targets = [keeper(0, 0, 0, SIZE), keeper(3, 1, 0, SIZE)]
    found = list(routes(sources, targets))
    assert_whole(found, targets)
    assert [(r.source.rank, r.start, r.stop) for r in found if r.target is targets[0]] == [
        (0, 0, 10),
        (1, 10, 20),
        (2, 20, 30),
    ]


@given(
    st.lists(st.integers(1, SIZE - 1), max_size=4, unique=True),
    st.lists(st.integers(0, 2), min_size=5, max_size=5),
    st.integers(0, 2),
)
def test_every_element_comes_once(cuts: list[int], lines: list[int], pipeline: int) -> None:
    bounds = itertools.pairwise([0, *sorted(cuts), SIZE])
    sources = [keeper(r, lines[r], low, high) for r, (low, high) in enumerate(bounds)]
    targets = [keeper(9, pipeline, 0, SIZE), keeper(8, 0, 3, 17)]
    found = list(routes(sources, targets))
    assert_whole(found, targets)
    for target in targets:
        own = [r.source for r in found if r.target is target]
        assert len(own) == len(set(own)), "no message more than there must be"
