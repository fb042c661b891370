"""Prices of steps."""

from __future__ import annotations

import pytest

from tutti.batching import LinearPrices, StepSize, TabledPrices


def test_a_chunk_adds_its_tokens_and_its_pairs() -> None:
    size = StepSize(decodes=3, prefill=0, keys=30).with_chunk(start=10, count=4)
    # the tokens at positions 10 to 13 look at 11, 12, 13 and 14 keys
    assert size == StepSize(3, 4, 30, 11 + 12 + 13 + 14, back=1)
    assert size.tokens == 7


def test_linear_prices_are_a_sum() -> None:
    prices = LinearPrices(step_s=1.0, token_s=0.1, key_s=0.01, pair_s=0.001)
    assert prices.seconds(StepSize(2, 8, 50, 100)) == pytest.approx(1.0 + 1.0 + 0.5 + 0.1)


def test_measured_steps_are_joined_by_lines_and_go_on_in_proportion() -> None:
    prices = TabledPrices(
        decode=((1, 1.0), (9, 5.0)), mixed=((16, 2.0), (32, 4.0)), key_s=0.0, pair_s=0.0
    )
    assert prices.seconds(StepSize(5, 0, 0)) == pytest.approx(3.0)
    assert prices.seconds(StepSize(0, 24, 0)) == pytest.approx(3.0)
    assert prices.seconds(StepSize(0, 64, 0)) == pytest.approx(8.0)


def test_a_step_costs_what_the_size_costs_that_it_is_filled_up_to() -> None:
    prices = TabledPrices(
        decode=((1, 1.0), (8, 2.0)),
        mixed=((64, 2.0), (512, 10.0), (768, 15.0)),
        key_s=0.0,
        pair_s=0.0,
        decode_sizes=(1, 8),
        mixed_sizes=(64, 512, 768),
    )
    assert prices.seconds(StepSize(2, 0, 0)) == pytest.approx(2.0)
    assert prices.seconds(StepSize(32, 481, 0)) == pytest.approx(15.0)
    assert prices.seconds(StepSize(32, 480, 0)) == pytest.approx(10.0)
