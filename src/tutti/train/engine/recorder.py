"""When each instruction of a step ran on this rank, and what the rank waited for in between.

Compute is timed where it runs: on the host's clock, or by the chip's own events where the host runs
ahead. A wait is the network's as long as the operation itself should take; what is longer is
another rank's lateness: bubble. Where the host runs ahead of the chip, its waiting counts only as
far as the chip stood still in the meantime. It costs two clock readings per instruction.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tutti.accelerator.accelerator import Accelerator, Event
from tutti.observe.record import RankTimes
from tutti.observe.ring import Kind, Ring
from tutti.schedule.instruction import Instruction, Lane, Op, What

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spans:
    """Seconds since the step's begin, per instruction."""

    start: FloatArray
    end: FloatArray
    step_s: float
    began: float  # of `time.time`, for laying ranks over each other
    waited: FloatArray  # how long compute was kept waiting for it


@dataclass(slots=True)
class Readings:
    """The clock readings of one step, which are worth something when the chip has done it."""

    begin: float
    began: float
    start: list[float]
    end: list[float]
    waits: list[tuple[int, int, float]]  # before which pass, for what, how many seconds
    events: list[tuple[Event, Event] | None]
    zero: Event | None = None
    finish: float = 0.0

    def settle(self) -> None:
        """Let the host wait until the chip has passed the last event."""
        pairs = [pair for pair in self.events if pair is not None]
        if pairs:
            pairs[-1][1].synchronize()


class Recorder:
    """Takes the clock readings of one rank's steps."""

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
        self._next = 0  # where the passes begin that are not yet issued
        self.last = self._new(0.0, 0.0)
        self.ring: Ring | None = None  # where the last events stay, whatever becomes of the rank

    def _new(self, begin: float, began: float) -> Readings:
        count = len(self._instructions)
        return Readings(begin, began, [0.0] * count, [0.0] * count, [], [None] * count)

    def expect(self, seconds: Sequence[float]) -> None:
        """Take how long each instruction should take by itself."""
        self._expected = list(seconds)

    def begin_step(self) -> None:
        """A step begins now; the readings of the one before are with whoever took them."""
        self.last = self._new(time.perf_counter(), time.time())
        self._next = 0
        if self.ring is not None:
            self.ring.begin_step(self.ring.step + 1)
        if self._on_chip:
            self.last.zero = self._accelerator.event(timed=True)
            self.last.zero.record()

    def waits(self, index: int) -> None:
        """Something begins to wait for an instruction."""
        if self.ring is not None:
            self.ring.note(Kind.WAIT, index)

    def waited(self, index: int, since: float) -> None:
        """Something was kept waiting for an instruction from `since` until now."""
        now = time.perf_counter()
        if self.ring is not None:
            self.ring.note(Kind.DONE, index)
        self.last.waits.append((self._next, index, now - since))
        self.finished(index, now)

    def finished(self, index: int, now: float | None = None) -> None:
        """An instruction that ran beside compute is known to be over."""
        if not self._computes[index]:
            self.last.end[index] = (time.perf_counter() if now is None else now) - self.last.begin

    def start(self, index: int) -> None:
        """An instruction is started."""
        if self.ring is not None:
            self.ring.note(Kind.START, index)
        last = self.last
        if self._computes[index]:
            self._next = index + 1
        if self._on_chip and self._computes[index]:
            pair = (self._accelerator.event(timed=True), self._accelerator.event(timed=True))
            last.events[index] = pair
            pair[0].record()
        last.start[index] = last.end[index] = time.perf_counter() - last.begin

    def issued(self, index: int) -> None:
        """The host has done its part of an instruction."""
        last = self.last
        pair = last.events[index]
        if pair is not None:
            pair[1].record()
        last.end[index] = time.perf_counter() - last.begin
        if not self._computes[index]:  # what the host spends on it keeps compute waiting
            last.waits.append((self._next, index, last.end[index] - last.start[index]))
        if self.ring is not None:
            self.ring.note(Kind.ISSUED, index)

    def end_step(self) -> None:
        """The host has issued everything and knows what the step came to."""
        self.last.finish = time.perf_counter() - self.last.begin
        if self.ring is not None:
            self.ring.note(Kind.STEP_END)

    # --- what it came to -------------------------------------------------------------------

    def spans(self, readings: Readings | None = None) -> Spans:
        """Return when everything ran; on a chip, compute by the chip's own clock.

        Of the last step, or of one whose readings were taken. The host waits for what the chip has
        yet to do of it.
        """
        step = self.last if readings is None else readings
        start, end = np.array(step.start), np.array(step.end)
        if step.zero is not None:
            step.settle()
            for i, pair in enumerate(step.events):
                if pair is not None:
                    start[i] = pair[0].seconds_since(step.zero)
                    end[i] = pair[1].seconds_since(step.zero)
        return Spans(
            start=start,
            end=end,
            step_s=step.finish,
            began=step.began,
            waited=self._kept_waiting(step, start, end),
        )

    def _kept_waiting(self, step: Readings, start: FloatArray, end: FloatArray) -> FloatArray:
        """Return how long compute was kept waiting for each instruction.

        The host computes, or its wait is cut to how long the chip stood still before the next pass.
        """
        waited = np.zeros(len(start))
        if step.zero is None:
            for _, index, seconds in step.waits:
                waited[index] += seconds
            return waited
        passes = np.flatnonzero(self._computes)
        begins = np.append(start[passes], step.finish)
        still = np.maximum(0.0, begins - np.append(0.0, end[passes]))
        gaps = np.searchsorted(passes, [after for after, _, _ in step.waits])
        sums = np.bincount(gaps, [seconds for _, _, seconds in step.waits], len(still))
        for gap, (_, index, seconds) in zip(gaps.tolist(), step.waits, strict=True):
            waited[index] += seconds * min(1.0, still[gap] / sums[gap]) if sums[gap] else 0.0
        return waited

    def times(self, readings: Readings | None = None) -> RankTimes:
        """Return where the last step went, or one whose readings were taken."""
        spans = self.spans(readings)
        computes = np.array(self._computes)
        compute = float((spans.end - spans.start)[computes].sum())
        communication = bubble = copy = data = 0.0
        for i, wait in enumerate(spans.waited.tolist()):
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
