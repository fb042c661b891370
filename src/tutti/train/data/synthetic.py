"""Rows of a seeded Markov chain: data without a file, from which a model can learn.

All tokens stand on one seeded ring. With probability 1 − s the next token is the ring's next, else
(a surprise) any token alike. A model that has learnt the ring reaches the chain's entropy, which
`floor_nats` tells. A row depends on its number alone, so that there is no end and no memory.
"""

from __future__ import annotations

import math

import numpy as np

from tutti.errors import InputError
from tutti.train.data.row import Row, targets_of

NUM_ROWS = 1 << 40


class SyntheticRows:
    """Rows of the chain, by their number."""

    name = "synthetic"

    def __init__(
        self, *, vocabulary: int, length: int, document_length: int, surprise: float, seed: int
    ) -> None:
        if vocabulary < 2:
            raise InputError(
                f"synthetic: a vocabulary of {vocabulary}; at least 2 tokens are needed"
            )
        self.length, self.vocabulary, self.surprise = length, vocabulary, surprise
        self._seed = seed
        size = min(document_length or length, length)
        whole, rest = divmod(length, size)
        self._lengths = (size,) * whole + ((rest,) if rest else ())
        self._starts = np.cumsum((0, *self._lengths[:-1]))
        ring = np.random.Generator(np.random.Philox(key=[seed, NUM_ROWS])).permutation(vocabulary)
        self._ring = ring.astype(np.int64)
        self._places = np.arange(length, dtype=np.int64)

    @property
    def num_rows(self) -> int:
        """More than any run takes."""
        return NUM_ROWS

    @property
    def floor_nats(self) -> float:
        """The chain's entropy per token: the loss that cannot be beaten."""
        jump = self.surprise / self.vocabulary
        stay = 1 - self.surprise + jump
        others = (self.vocabulary - 1) * jump
        return -(stay * math.log(stay)) - (others * math.log(jump) if jump else 0.0)

    def row(self, index: int) -> Row:
        """Return one row."""
        random = np.random.Generator(np.random.Philox(key=[self._seed, index]))
        jumps = random.random(self.length, dtype=np.float32) < self.surprise
        jumps[self._starts] = True
        last_jump = np.maximum.accumulate(np.where(jumps, self._places, 0))
        landing = random.integers(self.vocabulary, size=self.length)
        tokens = self._ring[(landing[last_jump] + self._places - last_jump) % self.vocabulary]
        return Row(tokens, targets_of(tokens, -100, self._lengths, None), self._lengths)
