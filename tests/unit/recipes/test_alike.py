"""Groups that are judged alike are counted, and said when every group of a batch is."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from tutti.recipes.reinforcement.advantages import group_advantages
from tutti.recipes.reinforcement.alike import Alike, share_alike


def test_the_share_of_drawn_groups() -> None:
    for seed in range(50):
        draw = random.Random(seed)
        size, count, scale = draw.randint(2, 9), draw.randint(1, 8), 10 ** draw.randint(-6, 6)
        groups, alike = [], 0
        for _ in range(count):
            if same := draw.random() < 0.5:
                # what is added up in another order differs by rounding alone
                parts = [draw.random() * scale for _ in range(3)]
                groups.append([sum(draw.sample(parts, 3)) for _ in range(size)])
            else:
                groups.append([draw.choice((0.0, 0.25, 1.0)) for _ in range(size - 1)] + [2.0])
            alike += same
        assert share_alike(np.asarray(groups)) == pytest.approx(alike / count)
    assert math.isnan(share_alike(np.asarray([])))


def test_nothing_is_learnt_from_what_counts_as_alike() -> None:
    parts = np.asarray([[0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1, 0.6, 0.6]])
    assert share_alike(parts) == 1.0
    assert np.abs(group_advantages(parts, normalise=True)).max() < 1e-9


def test_it_is_said_at_first_and_as_it_goes_on() -> None:
    alike = Alike()
    said = [alike.noted(1.0, [0.0, 0.0], "out/samples.jsonl") for _ in range(12)]
    assert [number for number, text in enumerate(said, 1) if text] == [1, 3, 10]
    assert "in this batch all answers to a prompt were worth the same (0)" in said[0]
    assert "for 10 batches in a row" in said[9]
    assert all("\n" not in text and "out/samples.jsonl" in text for text in said if text)
    assert alike.noted(0.75, [0.0, 1.0], "s") == ""
    assert "in this batch" in alike.noted(1.0, [0.0, 1.0], "s")  # a batch that taught lies between
    assert "0 to 1, one for each prompt" in Alike().noted(1.0, [0.0, 1.0], "s")


def test_a_batch_whose_groups_were_all_left_out_counts_neither_way() -> None:
    alike = Alike()
    shares = (1.0, float("nan"), 1.0, 1.0)
    said = [alike.noted(share, [0.5], "s") for share in shares]
    assert [bool(text) for text in said] == [True, False, False, True]
