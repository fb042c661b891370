"""Rows of a seeded Markov chain: data without a file, from which a model can learn.

All tokens stand on one seeded ring. With probability 1 − s the next token is the ring's next, else
(a surprise) any token alike. A model that has learnt the ring reaches the chain's entropy, which
`floor_nats` tells. A row depends on its number alone, so that there is no end and no memory.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from tutti.errors import InputError
from tutti.train.data.permutation import mixed
from tutti.train.data.row import NO_TARGET, Row, targets_of

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
        self._counters = self._places.astype(np.uint64) * np.uint64(_STEP)
        self._threshold = np.uint64(round(surprise * (1 << 32)))
        self._tokens = np.uint64(vocabulary)

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
        bits = _random_bits(self._seed, index, self._counters)
        jumps = (bits & _LOW) < self._threshold
        jumps[self._starts] = True
        last_jump = np.maximum.accumulate(np.where(jumps, self._places, 0))
        landing = ((bits >> _HALF) * self._tokens >> _HALF).astype(np.int64)
        tokens = self._ring[(landing[last_jump] + self._places - last_jump) % self.vocabulary]
        return Row(tokens, targets_of(tokens, NO_TARGET, self._lengths, None), self._lengths)


_HALF, _LOW = np.uint64(32), np.uint64((1 << 32) - 1)
_STEP, _SHIFTS = 0x9E3779B97F4A7C15, (np.uint64(30), np.uint64(27), np.uint64(31))
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def _random_bits(seed: int, index: int, counters: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return 64 random bits per counter: splitmix64, its state a hash of seed and index.

    A generator object per row would take longer to make than the row.
    """
    start = mixed(mixed(seed, _STEP), index)
    bits = counters + np.uint64(start)
    bits ^= bits >> _SHIFTS[0]
    bits *= _FACTORS[0]
    bits ^= bits >> _SHIFTS[1]
    bits *= _FACTORS[1]
    bits ^= bits >> _SHIFTS[2]
    return bits
