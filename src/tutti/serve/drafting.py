"""Guesses of the next tokens: from the text itself, and how many are worth trying.

The model computes a guess's tokens in the same step as the one before them. A token counts if it is
what the model itself chooses there, with the same random numbers as without any guesses: guessing
changes how fast tokens come and never which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


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
        found = {}
        for one in wanted:
            tokens = self._after(one.tokens, one.count)
            if tokens:
                found[one.sequence] = tokens
        return found

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
    rate: float = 0.7  # of guessed tokens that were right, the latest counting most
    pause: int = 0  # steps without guesses
    next_pause: int = 4


class Pace:
    """How many tokens a sequence tries: as many as are likely to be right, none for a while if few.

    A guessed token costs about as much as any other token of a step; it pays while the chance that
    it and those before it are right is above `worth`.
    """

    def __init__(self, most: int, worth: float = 0.35) -> None:
        self._most, self._worth = most, worth
        self._records: dict[int, _Record] = {}

    def count(self, sequence: int) -> int:
        """Return how many tokens to try now."""
        record = self._records.setdefault(sequence, _Record())
        if record.pause:
            record.pause -= 1
            return 0
        count = 1
        while count < self._most and record.rate ** (count + 1) >= self._worth:
            count += 1
        return count

    def note(self, sequence: int, tried: int, right: int) -> None:
        """Take how a try went."""
        record = self._records.setdefault(sequence, _Record())
        record.rate = 0.7 * record.rate + 0.3 * right / tried
        if record.rate < self._worth / 2:
            record.pause, record.next_pause = record.next_pause, min(64, 2 * record.next_pause)
            record.rate = self._worth
        elif right:
            record.next_pause = 4

    def forget(self, sequence: int) -> None:
        """Drop a sequence that ended."""
        self._records.pop(sequence, None)
