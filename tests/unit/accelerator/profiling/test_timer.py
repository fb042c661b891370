"""Samples and their summary; the host's timer."""

from __future__ import annotations

import pytest

from tutti.accelerator import open_accelerator
from tutti.accelerator.profiling.timer import (
    MOST_CALLS,
    HostTimer,
    QueueTimer,
    Samples,
    describe,
    timer_for,
)


def test_a_median_does_not_mind_an_outlier():
    samples = Samples([1.0, 1.1, 0.9, 1.0, 50.0])
    assert samples.median == 1.0
    assert samples.spread == pytest.approx(0.05)
    assert samples.error == pytest.approx(0.05 / 5**0.5)


@pytest.mark.parametrize(("seconds", "spread"), [([2.0], 0.0), ([1.0, 3.0], 0.5)])
def test_the_spread_of_few(seconds, spread):
    assert Samples(seconds).spread == spread


def test_short_calls_are_repeated_within_a_sample():
    timer = HostTimer()
    assert timer.calls_for(1.0) == 1
    assert timer.calls_for(timer.least_sample_s / 10) == 10
    assert timer.calls_for(0.0) == MOST_CALLS
    counted = []
    samples = Samples()
    timer.sample(lambda: counted.append(1), 7, samples)
    assert len(counted) == 7
    assert samples.seconds[0] > 0
    assert not timer.issues


def test_a_queue_is_filled_before_the_calls(monkeypatch):
    accelerator = open_accelerator("cpu")
    assert isinstance(timer_for(accelerator), HostTimer)
    monkeypatch.setattr("tutti.accelerator.profiling.timer.FILL_SIDES", (32,))
    timer = QueueTimer(accelerator)
    order: list[str] = []
    fill = timer._fill_once
    timer._fill_once = lambda: (order.append("fill"), fill())
    samples = Samples()
    timer.sample(lambda: order.append("run"), 3, samples)
    assert order[0] == "fill"
    assert order[-3:] == ["run"] * 3
    assert samples.issue_s < 1.0
    order.clear()
    timer.sample(lambda: order.append("run"), 2, samples, ahead=False)
    assert order == ["fill", "run", "run"]


def test_the_stack_names_torch_and_the_threads():
    said = describe(open_accelerator("cpu"))
    assert said.startswith("torch ")
    assert "thread" in said
