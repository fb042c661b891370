"""How long a call takes on a device: samples, and their robust summary.

On a device with a queue, the queue is first filled with a long product; the events around the calls
then see the device alone, not the host that issues them. Where the host computes itself, its
processor time counts if it works with one thread, else the clock; a small product timed before and
after each sample tells how much other jobs slowed the processor just then, and that is taken out.
"""

from __future__ import annotations

import math
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tutti.accelerator.accelerator import Accelerator

Run = Callable[[], Any]
# The small product that tells the pace of a host: its side, how long it is repeated, at least and
# as a share of the sample; how many make the pace of now and the usual one; what is taken out at
# most. One alone scatters more than what it is to correct: other jobs come and go in seconds.
PACE_SIDE, PACE_S, PACE_SHARE = 192, 1e-3, 0.03
RECENT_PACES, FIRST_PACES, MOST_PACES, MOST_SLOWED = 15, 40, 2000, 0.5
MOST_CALLS = 200  # per sample; device queues hold about a thousand
# The product that keeps a device busy while its queue is filled: the first that takes so long.
FILL_SIDES = (256, 1024, 4096)
LEAST_FILL_S = 1e-4


@dataclass(slots=True)
class Samples:
    """Repeats of one measurement, in seconds per call."""

    seconds: list[float] = field(default_factory=list)
    issue_s: float = math.inf  # the host's least time per call

    @property
    def median(self) -> float:
        """The middle repeat."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, over the median."""
        if len(self.seconds) < 3:
            return 0.0 if len(self.seconds) == 1 else self._range / 2.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / 2.0 / self.median

    @property
    def error(self) -> float:
        """How far the median may be off, relatively: the spread over the root of the repeats."""
        return self.spread / math.sqrt(len(self.seconds))

    @property
    def _range(self) -> float:
        return (max(self.seconds) - min(self.seconds)) / self.median


class Timer(ABC):
    """Takes samples on one device."""

    least_sample_s: float  # shorter calls are repeated within a sample
    issues: bool  # whether the host issues work for a device that runs beside it
    clock: str  # in words, for the profile

    @abstractmethod
    def sample(self, run: Run, calls: int, samples: Samples, *, ahead: bool = True) -> None:
        """Add one sample of so many calls; with `ahead` the host has issued them before."""

    def calls_for(self, seconds: float) -> int:
        """Return how many calls a sample of a call of so many seconds needs."""
        return max(1, min(MOST_CALLS, math.ceil(self.least_sample_s / max(seconds, 1e-7))))


class HostTimer(Timer):
    """The host computes itself, at the pace that other jobs leave it."""

    least_sample_s = 2e-3
    issues = False

    def __init__(self) -> None:
        alone = torch.get_num_threads() == 1
        self._now = time.process_time if alone else time.perf_counter
        self.clock = "processor time" if alone else "clock time"
        side = torch.full((PACE_SIDE, PACE_SIDE), 0.01)
        self._pace_once: Run = lambda: torch.mm(side, side)
        self._pace_once()
        self._paces = [self._pace(PACE_S) for _ in range(FIRST_PACES)]

    def _pace(self, seconds: float) -> float:
        """Return the seconds of the small product now, repeated for about so long."""
        start, count = self._now(), 0
        while True:
            for _ in range(8):
                self._pace_once()
            count += 8
            passed = self._now() - start
            if passed >= seconds:
                return passed / count

    def sample(self, run: Run, calls: int, samples: Samples, *, ahead: bool = True) -> None:
        """Add one sample of so many calls, at the usual pace of this session."""
        del ahead
        before = self._pace(PACE_S)
        start = self._now()
        for _ in range(calls):
            run()
        passed = self._now() - start
        pace = (before + self._pace(max(PACE_S, PACE_SHARE * passed))) / 2.0
        self._paces.append(pace)
        usual = statistics.median(self._paces[-MOST_PACES:])
        slowed = statistics.median(self._paces[-RECENT_PACES:]) / usual
        slowed = min(1.0 + MOST_SLOWED, max(1.0 / (1.0 + MOST_SLOWED), slowed))
        samples.seconds.append(max(1e-9, passed / calls / slowed))


class QueueTimer(Timer):
    """A device works off a queue that the host fills."""

    least_sample_s = 2e-3
    issues = True
    clock = "device events"

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        for side in FILL_SIDES:
            self._fill_once = self._product(side)
            self._fill_s = self._seconds_of_fill()
            if self._fill_s >= LEAST_FILL_S:
                break

    def _product(self, side: int) -> Run:
        square = torch.randn(side, side, device=self._accelerator.device, dtype=torch.bfloat16)
        return lambda: torch.mm(square, square)

    def _seconds_of_fill(self) -> float:
        for _ in range(3):
            self._fill_once()
        self._accelerator.synchronize()
        start, end = (self._accelerator.event(timed=True) for _ in range(2))
        start.record()
        for _ in range(10):
            self._fill_once()
        end.record()
        end.synchronize()
        return max(1e-5, end.seconds_since(start) / 10)

    def sample(self, run: Run, calls: int, samples: Samples, *, ahead: bool = True) -> None:
        """Add one sample of so many calls; with `ahead` the queue is filled before the first."""
        per_call = samples.issue_s if math.isfinite(samples.issue_s) else 1e-4
        start, end = (self._accelerator.event(timed=True) for _ in range(2))
        fills = math.ceil(1.3 * calls * per_call / self._fill_s) + 1 if ahead else 1
        for _ in range(min(MOST_CALLS, fills)):
            self._fill_once()
        start.record()
        issued = time.perf_counter()
        for _ in range(calls):
            run()
        issued = time.perf_counter() - issued
        end.record()
        end.synchronize()
        samples.seconds.append(max(1e-9, end.seconds_since(start) / calls))
        samples.issue_s = min(samples.issue_s, issued / calls)


def timer_for(accelerator: Accelerator) -> Timer:
    """Return the timer of a device."""
    return HostTimer() if accelerator.device.type == "cpu" else QueueTimer(accelerator)


def describe(accelerator: Accelerator) -> str:
    """Return the software that is measured, as a profile names it."""
    parts = [f"torch {torch.__version__}"]
    version = getattr(torch.version, accelerator.name, None)
    if isinstance(version, str):
        parts.append(f"{accelerator.name} {version}")
    if accelerator.device.type == "cpu":
        threads = torch.get_num_threads()
        clock = "processor time" if threads == 1 else "clock time"
        parts.append(f"{threads} thread{'s' if threads > 1 else ''}, {clock}")
    return ", ".join(parts)
