"""When a slow chip counts as well again: soon, on a busy host too; and not before it is."""

from __future__ import annotations

import random

import pytest

from tutti.diagnose.slow import Recovery


def told(factor: float, well_from: int, seed: int, *, stalls: float, noise: float) -> int:
    """Return the step at which a chip is said to be well; 0: never in 500 steps.

    `stalls`: how often a step takes up to half as long again, because the host is busy.
    """
    drawn, recovery = random.Random(seed), Recovery(factor)
    for step in range(1, 501):
        seconds = factor if step < well_from else 1.0
        seconds *= max(drawn.gauss(1.0, noise), 0.5)
        if drawn.random() < stalls:
            seconds *= drawn.uniform(1.0, 1.5)
        if recovery.step(seconds):
            return step
    return 0


@pytest.mark.parametrize("factor", [1.3, 1.5, 2.0])
@pytest.mark.parametrize("stalls", [0.0, 0.2])
def test_it_is_told_within_ten_steps_also_on_a_busy_host(factor: float, stalls: float) -> None:
    late = [told(factor, 60, seed, stalls=stalls, noise=0.03) - 60 for seed in range(100)]
    assert min(late) >= 0
    assert sorted(late)[94] <= 10


@pytest.mark.parametrize("factor", [1.3, 1.5, 2.0])
def test_a_chip_that_stays_slow_is_not_well(factor: float) -> None:
    ends = [told(factor, 10_000, seed, stalls=0.2, noise=0.05) for seed in range(100)]
    assert ends == [0] * 100
