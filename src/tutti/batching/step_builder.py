"""What is put together while a step is made."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tutti.batching.prices import StepSize
from tutti.batching.step import I32, Beginning

EMPTY = StepSize(0, 0, 0)


@dataclass(slots=True)
class Draft:
    """Rows chosen so far."""

    budget: int  # tokens that are left
    singles: I32 = field(default_factory=lambda: np.empty(0, np.int32))  # slots with one token
    chunks: list[tuple[int, int]] = field(default_factory=list)  # slots with several, how many
    copies: list[tuple[int, int]] = field(default_factory=list)
    begins: list[Beginning] = field(default_factory=list)
    guesses: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by slot, behind its token
    size: StepSize = EMPTY

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return len(self.singles) + sum(count for _, count in self.chunks)

    def add_chunk(self, slot: int, start: int, count: int) -> None:
        """Take a row of so many tokens behind so many that are stored."""
        self.chunks.append((slot, count))
        self.budget -= count
        self.size = self.size.with_chunk(start, count)

    def rows(self) -> tuple[I32, I32]:
        """Return slots and numbers of tokens, rows of one token first."""
        if not self.chunks:
            return self.singles, np.ones(len(self.singles), np.int32)
        chunks = sorted(self.chunks, key=lambda row: row[1] > 1)
        slots = np.array([slot for slot, _ in chunks], np.int32)
        counts = np.array([count for _, count in chunks], np.int32)
        ones = np.ones(len(self.singles), np.int32)
        return np.concatenate((self.singles, slots)), np.concatenate((ones, counts))
