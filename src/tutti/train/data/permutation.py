"""A seeded permutation of any number of rows that needs no memory.

A Feistel network permutes all numbers of b bits; numbers outside the range are sent through again
until they fall into it, which gives a permutation of the range itself. Looking up one place costs
microseconds, for ten rows and for 10^12 alike, so that any sample of any epoch is found directly.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

_ROUNDS = 6
_MASK = (1 << 64) - 1


@functools.lru_cache(maxsize=256)
def _round_keys(*seeds: int) -> tuple[int, ...]:
    state = np.random.SeedSequence(seeds).generate_state(_ROUNDS, np.uint64)
    return tuple(int(key) for key in state)


def mixed(value: int, key: int) -> int:
    """Return 64 well mixed bits (the finaliser of splitmix64)."""
    value = (value + key) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def permuted(index: int, size: int, seeds: Sequence[int]) -> int:
    """Return where a seeded permutation of range(size) sends `index`."""
    if not 0 <= index < size:
        raise IndexError(f"{index} is not in a range of {size}")
    bits = max(2, (size - 1).bit_length())
    low = bits // 2
    high = bits - low
    keys = _round_keys(*seeds)
    while True:
        for key in keys:
            # the halves change places, and with them their widths, in every round
            left, right = index >> low, index & ((1 << low) - 1)
            left ^= mixed(right, key) & ((1 << high) - 1)
            index = (right << high) | left
            low, high = high, low
        if index < size:  # an even number of rounds: the widths are as they were
            return index
