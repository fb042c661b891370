"""When each instruction of a step ran on this rank, and what the rank waited for in between.

Compute is timed where it runs: on the host's clock, or by the chip's own events where the host runs
ahead. A wait is the network's as long as the operation itself should take; what is longer is
another rank's lateness: bubble. The parts and the spans cost two clock readings per instruction.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tutti.accelerator.accelerator import Accelerator, Event
from tutti.observe.record import RankTimes
from tutti.schedule.instruction import Instruction, Lane, Op, What

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spans:
    """Seconds since the step's begin, per instruction."""

    start: FloatArray
    end: FloatArray
    step_s: float
    began: float  # of `time.time`, for laying ranks over each other
    waited: FloatArray  # how long something was kept waiting for it


class Recorder:
    """Clock readings of one rank's step, used again for each."""

    def __init__(
        self,
        instructions: Sequence[Instruction],
        accelerator: Accelerator,
        expected_s: Sequence[float] | None = None,
    ) -> None:
        count = len(instructions)
        self._instructions, self._accelerator = list(instructions), accelerator
        self._expected = list(expected_s) if expected_s is not None else [0.0] * count
        self._on_chip = accelerator.device.type != "cpu"
        self._computes = [entry.lane is Lane.COMPUTE for entry in instructions]
        self._start, self._end = [0.0] * count, [0.0] * count
        self._events: list[tuple[Event, Event] | None] = [None] * count
        self._waits = [0.0] * count  # seconds that something else waited for an instruction
        self._zero: Event | None = None
        self._begin = self._began = 0.0
        self._finish = 0.0

    def expect(self, seconds: Sequence[float]) -> None:
        """Take how long each instruction should take by itself."""
        self._expected = list(seconds)

    def begin_step(self) -> None:
        """A step begins now."""
        self._begin, self._began = time.perf_counter(), time.time()
        self._waits = [0.0] * len(self._instructions)
        if self._on_chip:
            self._zero = self._accelerator.event(timed=True)
            self._zero.record()

    def waited(self, index: int, since: float) -> None:
        """Something was kept waiting for an instruction from `since` until now."""
        now = time.perf_counter()
        self._waits[index] += now - since
        self.finished(index, now)

    def finished(self, index: int, now: float | None = None) -> None:
        """An instruction that ran beside compute is known to be over."""
        if not self._computes[index]:
            self._end[index] = (time.perf_counter() if now is None else now) - self._begin

    def start(self, index: int) -> None:
        """An instruction is started."""
        if self._on_chip and self._computes[index]:
            pair = (self._accelerator.event(timed=True), self._accelerator.event(timed=True))
            self._events[index] = pair
            pair[0].record()
        self._start[index] = self._end[index] = time.perf_counter() - self._begin

    def issued(self, index: int) -> None:
        """The host has done its part of an instruction."""
        pair = self._events[index]
        if pair is not None:
            pair[1].record()
        self._end[index] = time.perf_counter() - self._begin
        if not self._computes[index]:  # what the host spends on it keeps compute waiting
            self._waits[index] += self._end[index] - self._start[index]

    def end_step(self) -> None:
        """The step is over; the host has waited for everything."""
        self._finish = time.perf_counter() - self._begin

    # --- what it came to -------------------------------------------------------------------

    def spans(self) -> Spans:
        """Return when everything ran; on a chip, compute by the chip's own clock."""
        start, end = np.array(self._start), np.array(self._end)
        if self._zero is not None:
            for i, pair in enumerate(self._events):
                if pair is not None:
                    start[i] = pair[0].seconds_since(self._zero)
                    end[i] = pair[1].seconds_since(self._zero)
        return Spans(
            start=start,
            end=end,
            step_s=self._finish,
            began=self._began,
            waited=np.array(self._waits),
        )

    def times(self) -> RankTimes:
        """Return where the step went."""
        spans = self.spans()
        computes = np.array(self._computes)
        compute = float((spans.end - spans.start)[computes].sum())
        communication = bubble = copy = data = 0.0
        for i, wait in enumerate(self._waits):
            if not wait:
                continue
            entry = self._instructions[i]
            if entry.op is Op.FETCH and entry.what is What.BATCH:
                data += wait
            elif entry.lane is Lane.COPY:
                copy += wait
            elif entry.lane is Lane.NETWORK:
                own = min(wait, self._expected[i])
                communication += own
                bubble += wait - own
        known = compute + communication + bubble + copy + data
        memory = self._accelerator.memory().peak if self._accelerator.counts_memory else 0
        overrun = getattr(self._accelerator, "overrun", None)
        return RankTimes(
            step_s=spans.step_s,
            compute_s=compute,
            communication_s=communication,
            bubble_s=bubble,
            copy_s=copy,
            data_s=data,
            other_s=max(0.0, spans.step_s - known),
            peak_bytes=float(memory),
            overrun=overrun.share if overrun is not None else 0.0,
        )
