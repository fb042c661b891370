"""Times functions on a device side by side: medians of interleaved rounds, and peak memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tutti.accelerator.accelerator import Accelerator
from tutti.accelerator.profiling.timer import Samples, timer_for


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """What one function took."""

    seconds: float  # median
    spread: float  # half the distance between the quartiles ÷ median
    peak_bytes: int  # above what was in use before; 0 where the device keeps no count


def seconds_of(accelerator: Accelerator, function: Callable[[], Any], *, inner: int = 1) -> float:
    """Return the device's seconds per call over `inner` calls after each other."""
    start, end = accelerator.event(timed=True), accelerator.event(timed=True)
    accelerator.synchronize()
    start.record()
    for _ in range(inner):
        function()
    end.record()
    end.synchronize()
    return end.seconds_since(start) / inner


def peak_of(accelerator: Accelerator, function: Callable[[], Any]) -> int:
    """Return the memory that one call needs beyond what is in use; 0 where nobody counts it."""
    if not accelerator.counts_memory:
        return 0
    accelerator.synchronize()
    accelerator.reset_peak()
    before = accelerator.memory().allocated
    kept = function()
    accelerator.synchronize()
    peak = accelerator.memory().peak
    del kept
    return max(0, peak - before)


def side_by_side(
    accelerator: Accelerator,
    functions: Mapping[str, Callable[[], Any]],
    *,
    rounds: int = 20,
    warm_up: int = 3,
) -> dict[str, Timed]:
    """Time functions in turn, round by round, so that a noisy moment falls on all of them.

    What counts is the device's own time: the host issues a sample's calls before they start.
    """
    timer = timer_for(accelerator)
    calls: dict[str, int] = {}
    peaks: dict[str, int] = {}
    samples = {name: Samples() for name in functions}
    for name, function in functions.items():
        for _ in range(warm_up):
            function()
        peaks[name] = peak_of(accelerator, function)
        trial = Samples()
        for _ in range(2):  # the first one tells how long the host takes to issue a call
            timer.sample(function, 1, trial)
        calls[name] = timer.calls_for(min(trial.seconds))
        samples[name].issue_s = trial.issue_s
    for _ in range(rounds):
        for name, function in functions.items():
            timer.sample(function, calls[name], samples[name])
    return {
        name: Timed(seconds=each.median, spread=each.spread, peak_bytes=peaks[name])
        for name, each in samples.items()
    }
