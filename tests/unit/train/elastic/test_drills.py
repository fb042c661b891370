"""Faults that are injected: a slow chip's factor from step to step."""

from __future__ import annotations

import statistics

import pytest

from tutti.train.elastic.drills import _factor
from tutti.train.run.config import DrillConfig


@pytest.mark.parametrize("spread", [0.0, 0.05])
def test_a_slow_chips_factor_varies_as_asked_and_is_the_same_for_a_step_made_again(
    spread: float,
) -> None:
    drill = DrillConfig(fault="slow", chip="fast/0/1", factor=1.5, spread=spread)
    factors = [_factor(drill, "fast/0/1", step) for step in range(500)]
    assert factors == [_factor(drill, "fast/0/1", step) for step in range(500)]
    assert statistics.mean(factors) == pytest.approx(1.5, rel=0.02)
    assert statistics.stdev(factors) == pytest.approx(1.5 * spread, rel=0.15)
    other = [_factor(drill, "fast/0/0", step) for step in range(500)]
    assert (other == factors) == (spread == 0.0)
