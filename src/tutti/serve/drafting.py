"""Guesses of the next tokens: from the text itself, and how many are worth trying.

The model computes a guess's tokens in the same step as the one before them. A token counts if it is
what the model itself chooses there, with the same random numbers as without any guesses: guessing
changes how fast tokens come and never which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tutti.batching.prices import Prices, StepSize

WORTH = 0.35  # the chance from which on a guess pays where steps have no prices
FADES = 0.8  # of what was, with each try


@dataclass(frozen=True, slots=True)
class Wanted:
    """A sequence that may try so many tokens."""

    slot: int
    sequence: int
    tokens: NDArray[np.int32]  # prompt and answer so far
    count: int


class Drafter(Protocol):
    """Guesses how sequences go on."""

    def guess(self, wanted: Sequence[Wanted]) -> dict[int, tuple[int, ...]]:
        """Return guesses by sequence; fewer tokens than asked for, or none, are welcome."""


class NgramDrafter:
    """Looks for what followed the last time that the text ended like this."""

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        self._sizes = range(longest, shortest - 1, -1)

    def guess(self, wanted: Sequence[Wanted]) -> dict[int, tuple[int, ...]]:
        """Return what followed the longest ending that was there before, the latest time."""
        drafts = {}
        for one in wanted:
            tokens = self._after(one.tokens, one.count)
            if tokens:
                drafts[one.sequence] = tokens
        return drafts

    def _after(self, tokens: NDArray[np.int32], count: int) -> tuple[int, ...]:
        for size in self._sizes:
            if len(tokens) <= size:
                continue
            ending = tokens[-size:]
            windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], size)
            places = np.flatnonzero((windows == ending).all(axis=1))
            if len(places):
                first = int(places[-1]) + size
                return tuple(int(token) for token in tokens[first : first + count])
        return ()


@dataclass(slots=True)
class _Record:
    """How guesses of a sequence went, the latest counting most."""

    right: float = 1.4
    judged: float = 2.0  # those behind the first wrong one say nothing
    pause: int = 0  # steps without guesses
    next_pause: int = 4

    @property
    def rate(self) -> float:
        """The chance that a token is right if those before it are."""
        return self.right / self.judged


class Pace:
    """How many tokens sequences try: as many as pay, none for a while where few are right.

    With prices of steps: those with which the step gives most tokens a second. Without, a guessed
    token pays while the chance that it and those before it are right is above `WORTH`.
    """

    def __init__(self, most: int, prices: Prices | None = None) -> None:
        self._most, self._prices = most, prices
        self._records: dict[int, _Record] = {}

    def counts(self, lengths: Mapping[int, int]) -> dict[int, int]:
        """Return how many tokens each sequence tries now, by its length; none: it is left out."""
        records = {name: self._records.setdefault(name, _Record()) for name in lengths}
        trying = {name: record.rate for name, record in records.items() if not record.pause}
        for record in records.values():
            record.pause = max(0, record.pause - 1)
        if not trying:
            return {}
        worth = WORTH if self._prices is None else self._worth(lengths, trying)
        return {name: count for name, rate in trying.items() if (count := self._count(rate, worth))}

    def _count(self, rate: float, worth: float) -> int:
        count, chance = 0, rate
        while count < self._most and chance >= worth:
            count, chance = count + 1, chance * rate
        return count

    def _worth(self, lengths: Mapping[int, int], trying: Mapping[int, float]) -> float:
        """Return the chance from which on a guess pays, if all try alike: beyond 1 if none does."""
        assert self._prices is not None
        mean = sum(trying.values()) / len(trying)
        met = sum(lengths[name] for name in trying)
        plain = StepSize(len(lengths) - len(trying), 0, sum(lengths.values()) - met)
        alone = plain._replace(decodes=len(lengths), keys=plain.keys + met)
        best, worth = len(lengths) / self._prices.seconds(alone), 2.0
        gained, chance = float(len(lengths)), 1.0
        for count in range(1, self._most + 1):
            chance *= mean
            gained += len(trying) * chance
            tried = plain._replace(prefill=len(trying) * (1 + count), pairs=met * (1 + count))
            rate = gained / self._prices.seconds(tried)
            if rate > best:
                best, worth = rate, chance * (1 - 1e-9)  # equal rates have a mean beside them
        return worth

    def note(self, sequence: int, tried: int, right: int) -> None:
        """Take how a try went."""
        record = self._records.setdefault(sequence, _Record())
        record.right = FADES * record.right + right
        record.judged = FADES * record.judged + right + (right < tried)
        if record.rate < WORTH / 2:
            record.pause, record.next_pause = record.next_pause, min(64, 2 * record.next_pause)
            record.right, record.judged = WORTH, 1.0
        elif right:
            record.next_pause = 4

    def forget(self, sequence: int) -> None:
        """Drop a sequence that ended."""
        self._records.pop(sequence, None)
