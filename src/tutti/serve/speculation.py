"""An engine's guesses: whether they pay, which sequences try how many, and how they went."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tutti.batching import Received, Scheduler, Step
from tutti.batching import Sequence as Sample
from tutti.serve.drafting import Drafter, Pace, Wanted
from tutti.serve.outputs import Counters

TRIES = 6  # steps of each way before one is chosen
AGAIN, MOST_AGAIN = 256, 4096  # steps until the other way is tried again; twice as many each time
FADES = 0.9  # of what was, with each step


@dataclass(slots=True)
class _Speed:
    """Tokens and seconds of steps of one way, the latest counting most."""

    steps: int = 0
    tokens: float = 0.0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def note(self, tokens: int, seconds: float) -> None:
        self.steps += 1
        self.tokens = FADES * self.tokens + tokens
        self.seconds = FADES * self.seconds + seconds


@dataclass(slots=True)
class _Way:
    """Steps of about so many rows, with guesses and without."""

    speeds: dict[bool, _Speed] = field(default_factory=lambda: {True: _Speed(), False: _Speed()})
    wait: int = AGAIN
    left: int = AGAIN

    @property
    def guesses(self) -> bool:
        for guesses, speed in self.speeds.items():
            if speed.steps < TRIES:
                return guesses
        return self.speeds[True].rate > self.speeds[False].rate

    def note(self, guessed: bool, tokens: int, seconds: float) -> None:
        self.speeds[guessed].note(tokens, seconds)
        self.left -= 1
        if not self.left:  # what did not pay may pay now
            self.wait = self.left = min(MOST_AGAIN, 2 * self.wait)
            self.speeds[not self.guesses] = _Speed(steps=TRIES // 2)


class Switch:
    """Turns guesses on and off by the tokens a second that came with them and without.

    A step that tries guesses waits for the tokens before it, where steps may otherwise follow each
    other without the host: what that costs no price of steps tells. Rows count in powers of two.
    """

    def __init__(self) -> None:
        self._ways: dict[int, _Way] = {}

    def on(self, rows: int) -> bool:
        """Tell whether steps of so many rows try guesses now."""
        return self._ways.setdefault(rows.bit_length(), _Way()).guesses

    def note(self, rows: int, guessed: bool, tokens: int, seconds: float) -> None:
        """Take what a step gave that followed one of its kind."""
        self._ways.setdefault(rows.bit_length(), _Way()).note(guessed, tokens, seconds)


class Speculation:
    """Guesses of an engine's sequences.

    Without a switch there are guesses in every step.
    """

    def __init__(
        self,
        drafter: Drafter,
        pace: Pace,
        counters: Counters,
        *,
        switch: Switch | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._drafter, self._pace, self._counters = drafter, pace, counters
        self._switch, self._clock = switch, clock
        self._on = True  # whether steps under way try guesses, or the last one did
        self._last: tuple[bool, float] | None = None  # the same, and when its tokens came

    def ready(
        self, scheduler: Scheduler, under_way: int, may_try: Callable[[Sample], bool]
    ) -> bool:
        """Tell whether the next step may be made now; give the scheduler its guesses.

        What is tried hangs on the tokens before it: such a step waits for those under way, and
        none is made while it is.
        """
        if under_way and self._on:
            return False
        running = scheduler.num_running
        on = self._switch is None or self._switch.on(running)
        if on and under_way:
            return False
        self._on = on
        if not running:
            self._last = None  # nobody waited for what comes next
        if not on:
            return True
        decoding = {
            sample.id: (slot, tokens)
            for slot, sample, tokens in scheduler.decoding()
            if may_try(sample)
        }
        counts = self._pace.counts({name: len(tokens) for name, (_, tokens) in decoding.items()})
        wanted = [Wanted(decoding[n][0], n, decoding[n][1], count) for n, count in counts.items()]
        if wanted:
            scheduler.guess(self._drafter.guess(wanted))
        return True

    def note(self, step: Step, received: Received) -> None:
        """Take how a step's guesses went."""
        tried: dict[int, int] = {}
        for row, offset in zip(
            step.sample_rows.tolist(), step.sample_offsets.tolist(), strict=True
        ):
            name = int(step.sequences[row])
            tried[name] = max(tried.get(name, 0), offset)
        names = received.sequences.tolist()
        for name, count in tried.items():
            if count and name in names:
                right = names.count(name) - 1
                self._pace.note(name, count, right)
                self._counters.guessed_tokens += count
                self._counters.foreseen_tokens += right
        self._time(step, len(names))

    def _time(self, step: Step, tokens: int) -> None:
        now, last = self._clock(), self._last
        self._last = self._on, now
        decodes = step.num_tokens == len(step.sample_rows)  # no row is part of a prompt
        if self._switch is None or last is None or last[0] != self._on or not decodes:
            return
        self._switch.note(len(set(step.sequences.tolist())), self._on, tokens, now - last[1])

    def forget(self, sample: Sample) -> None:
        """Drop a sequence that ended."""
        self._pace.forget(sample.id)
