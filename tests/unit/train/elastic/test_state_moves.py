"""Live moves: every rank gets each number it wants once, from somebody who has it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tutti.ownership.rectangles import Rectangle, difference, intersection, rectangles
from tutti.train.elastic.state_moves import find_moves, from_words, to_words

SHAPE = (5, 6)


def cut(start: int, stop: int) -> list[Rectangle]:
    return [rectangle for _, rectangle in rectangles(SHAPE, start, stop)]


Ranges = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 30)).map(sorted), min_size=1, max_size=5
)


@given(Ranges, Ranges)
def test_each_number_comes_once_or_is_named_as_missing(
    held: list[list[int]], wanted: list[list[int]]
) -> None:
    ranks = max(len(held), len(wanted))
    offers = [{"t": cut(*held[r])} if r < len(held) else {} for r in range(ranks)]
    wants = [{"t": cut(*wanted[r])} if r < len(wanted) else {} for r in range(ranks)]
    moves, missing = find_moves(offers, wants)
    for rank in range(ranks):
        got = np.zeros(SHAPE, dtype=int)
        for move in (m for m in moves if m.target == rank):
            inside = [have for have in offers[move.source]["t"]
                      if intersection(have, move.rectangle) == move.rectangle]  # fmt: skip
            assert inside, "a move lies inside one rectangle of its source"
            got[move.rectangle.slices] += 1
        for gap in (m for m in missing if m.target == rank):
            got[gap.rectangle.slices] += 1
        due = np.zeros(SHAPE, dtype=int)
        for rectangle in wants[rank].get("t", ()):
            due[rectangle.slices] += 1
        assert (got == due).all()
    everywhere = np.zeros(SHAPE, dtype=bool)
    for offered in offers:
        for rectangle in offered.get("t", ()):
            everywhere[rectangle.slices] = True
    assert not any(everywhere[gap.rectangle.slices].any() for gap in missing)


def test_what_a_rank_has_itself_stays_there_and_the_others_take_turns() -> None:
    whole = [Rectangle((0, 0), SHAPE)]
    offers = [{"t": whole}, {"t": whole}, {}, {}]
    moves, missing = find_moves(offers, [{"t": whole}] * 4)
    assert not missing
    assert [(m.source, m.target) for m in moves] == [(0, 0), (1, 1), (0, 2), (1, 3)]


def test_words_come_back() -> None:
    offers = {"weight/1.a": cut(3, 20), "mean/scalar": [Rectangle((), ())]}
    assert from_words(to_words(offers)) == offers


@given(st.data())
def test_what_is_outside_of_a_rectangle(data: st.DataObject) -> None:
    def box() -> Rectangle:
        ends = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in SHAPE]
        return Rectangle(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))

    a, b = box(), box()
    found = np.zeros(SHAPE, dtype=int)
    for part in difference(a, b):
        found[part.slices] += 1
    due = np.zeros(SHAPE, dtype=int)
    due[a.slices] = 1
    due[b.slices] = 0
    assert (found == due).all()
