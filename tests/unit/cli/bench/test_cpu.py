"""`tutti bench cpu`: ranks of both sides train the same tokens, and their processor time counts."""

from __future__ import annotations

import math

import pytest

from tutti.bench.cpu.contenders import WAYS, Size
from tutti.bench.cpu.turns import TurnsQuestion, Used, _together, measure


def test_rounds_add_up_over_ranks() -> None:
    way = WAYS[1]
    asked = TurnsQuestion(size=Size(sequences=2, length=50), rounds=2, steps=3)
    answers = [
        [Used(1.0, 2.0, 5.0, 6.0), Used(2.0, 1.0, 4.0, 5.0)],
        [Used(3.0, 2.0, 5.0, 6.0), Used(2.0, 1.0, 6.0, 7.0)],
    ]
    found = _together(way, asked, answers)
    tokens = 2 * 100 * 3
    assert [(r.ours, r.theirs) for r in found.rounds] == [
        (tokens / 4, tokens / 4), (tokens / 4, tokens / 2)
    ]  # fmt: skip
    assert found.rounds[1].ratio == 0.5
    assert (found.our_loss, found.their_loss) == (5.0, 6.0)


def test_ranks_have_tokens_of_their_own() -> None:
    size = Size(sequences=1, length=8)
    assert size.of_rank(0).tolist() == size.of_rank(0).tolist() != size.of_rank(1).tolist()


@pytest.mark.slow
def test_all_ways_train() -> None:
    asked = TurnsQuestion(size=Size(sequences=1, length=32), rounds=1, steps=2)
    answers = list(measure(asked, lambda text: None))
    assert [answer.way.name for answer in answers] == [way.name for way in WAYS]
    for answer in answers:
        assert all(r.ours > 0 and r.theirs > 0 for r in answer.rounds)
        # a few steps from random weights: about the vocabulary's entropy on both sides
        assert abs(answer.our_loss - math.log(16384)) < 0.7
        assert abs(answer.our_loss - answer.their_loss) < 0.3
