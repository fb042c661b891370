"""Times functions on a device side by side: medians of interleaved rounds, and peak memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tutti.accelerator.accelerator import Accelerator


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """What one function took."""

    seconds: float  # median
    spread: float  # (third quartile − first) ÷ median
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
    """Return the memory that one call needs beyond what is in use."""
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
    least_s: float = 2e-3,
    captured: bool = False,
) -> dict[str, Timed]:
    """Time functions in turn, round by round, so that a noisy moment falls on all of them.

    With `captured`, what is timed is a graph of the function's kernels where the device has graphs:
    the device's own time, whatever the host takes to launch them.
    """
    inner: dict[str, int] = {}
    peaks: dict[str, int] = {}
    replays: dict[str, Callable[[], Any]] = {}
    for name, function in functions.items():
        for _ in range(warm_up):
            function()
        peaks[name] = peak_of(accelerator, function)
        replay = accelerator.capture(function) if captured else None
        replays[name] = replay or function
        once = seconds_of(accelerator, replays[name])
        inner[name] = max(1, min(100, int(least_s / max(once, 1e-7))))
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in replays.items():
            samples[name].append(seconds_of(accelerator, function, inner=inner[name]))
    return {
        name: Timed(
            seconds=statistics.median(values), spread=_spread(values), peak_bytes=peaks[name]
        )
        for name, values in samples.items()
    }


def _spread(values: list[float]) -> float:
    if len(values) < 2:
        return 0.0
    first, middle, third = statistics.quantiles(values, n=4)
    return (third - first) / middle
