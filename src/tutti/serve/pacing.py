"""`StagePace`: lets a stage on an emulated chip take that chip's time, and counts what was late.

On declared time a step takes what the cost model says of it (`cost/serving`); the numbers are
computed on the host all the same. On dilated time it takes so many times the host's own.
"""

from __future__ import annotations

import time

from tutti.accelerator import Accelerator
from tutti.accelerator.devices.emulated import EmulatedAccelerator, wait_until
from tutti.batching.step import Step
from tutti.cost.serving.engine_prices import EnginePrices
from tutti.cost.serving.step_load import load_of


class StagePace:
    """The time of one rank's part of each step."""

    def __init__(self, accelerator: EmulatedAccelerator, prices: EnginePrices, stage: int) -> None:
        self._accelerator, self._prices, self._stage = accelerator, prices, stage
        self._windows = prices.windows
        self._began = self._busy = 0.0

    def begin(self) -> None:
        """Start a step: its inputs are here."""
        self._began, self._busy = time.perf_counter(), time.thread_time()

    def end(self, step: Step) -> None:
        """Wait until the emulated chip would be done."""
        if self._accelerator.mode == "dilated":
            due = self._accelerator.factor * (time.thread_time() - self._busy)
        else:
            due = self._prices.part_seconds(self._stage, load_of(step, self._windows))
        overrun = self._accelerator.overrun
        overrun.due_s += due
        overrun.late_s += wait_until(self._began + due)


def pace_for(accelerator: Accelerator, prices: EnginePrices, stage: int) -> StagePace | None:
    """Return the pace of a stage; None on a chip that is what it is."""
    if not isinstance(accelerator, EmulatedAccelerator):
        return None
    return StagePace(accelerator, prices, stage)
