"""Sampling of this host into a store."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path

from tutti.observe.samplers.sampler import Values
from tutti.observe.samplers.sampling import HostSampling, Rates
from tutti.observe.store import SeriesStore


def test_counters_become_rates() -> None:
    rates = Rates()
    first = rates.of({"a_ratio": 0.5, "b_total": 10}, 1.0)
    assert first["a_ratio"] == 0.5
    assert math.isnan(first["b_total"])
    assert rates.of({"a_ratio": 0.6, "b_total": 30}, 3.0) == {"a_ratio": 0.6, "b_total": 10}
    assert math.isnan(rates.of({"b_total": 3}, 4.0)["b_total"])  # it was set back
    assert rates.of({"b_total": 5}, 5.0) == {"b_total": 2}


class Counting:
    def __init__(self, enough: int) -> None:
        self.calls, self.enough, self.done = 0, enough, threading.Event()

    def sample(self) -> Values:
        self.calls += 1
        if self.calls >= self.enough:
            self.done.set()
        return {"x_ratio": float(self.calls)}


def test_a_host_is_sampled_until_it_is_closed(tmp_path: Path) -> None:
    counting = Counting(3)
    sampling = HostSampling(tmp_path / "new" / "s.sqlite", samplers=[counting], every_s=0.01)
    assert counting.done.wait(30)
    sampling.close()
    calls = counting.calls
    store = SeriesStore(tmp_path / "new" / "s.sqlite", read_only=True)
    now = int(time.time())
    (series,) = store.read("x_ratio", now - 100, now + 10)
    assert 1 <= series.mean[-1] <= calls


class Failing:
    def __init__(self) -> None:
        self.asked = threading.Event()

    def sample(self) -> Values:
        self.asked.set()
        raise OSError("gone")


def test_trouble_is_said_and_ends_sampling_only(tmp_path: Path) -> None:
    said: list[str] = []
    sampling = HostSampling(tmp_path / "s.sqlite", samplers=[Failing()], say=said.append)
    sampling.close()
    assert said == ["this host is sampled no longer (gone)"]
