"""Instructions of a list that cost the same: priced once, then spread over the list.

A list has thousands of instructions but few kinds of them: the same operation on the same units,
whatever the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tutti.schedule.instruction import Instruction, Op
from tutti.schedule.listing import OP_CODE, Integers, Listing, listing_of

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Kinds:
    """One instruction of each kind, and the kind of every instruction."""

    examples: tuple[Instruction, ...]
    codes: Integers
    after_receive: Integers  # the passes that wait for a Receive, once per Receive
    listing: Listing

    @classmethod
    def of(cls, instructions: Sequence[Instruction]) -> Kinds:
        """Sort a list's instructions by kind."""
        listing = listing_of(instructions)
        return cls(listing.examples, listing.kinds[1], _after_receive(listing), listing)

    def joined(self, likeness: Callable[[int], object]) -> Kinds:
        """Return fewer kinds, where units that are alike need not be told apart."""
        numbers: dict[object, int] = {}
        units: dict[int, int] = {}  # numbered by likeness
        known: dict[object, int] = {}
        examples: list[Instruction] = []
        codes = np.empty(len(self.examples), dtype=np.int64)
        for place, entry in enumerate(self.examples):
            op, micro_batch, start, stop, what, scope, _ = entry
            for unit in range(start, stop):
                if unit not in units:
                    units[unit] = numbers.setdefault(likeness(unit), len(numbers))
            where = tuple(map(units.__getitem__, range(start, stop))) if stop > start else start
            key = (op, what, scope, micro_batch < 0, where)
            codes[place] = known.setdefault(key, len(known))
            if codes[place] == len(examples):
                examples.append(entry)
        return Kinds(tuple(examples), codes[self.codes], self.after_receive, self.listing)

    def spread(self, figure: Callable[[Instruction], float]) -> FloatArray:
        """Return a figure of every instruction, asked for once per kind."""
        table = np.array([figure(example) for example in self.examples], dtype=np.float64)
        return table[self.codes] if len(table) else np.zeros(0)


def _after_receive(listing: Listing) -> Integers:
    source = listing.sources
    passes = np.isin(listing.op[source], (OP_CODE[Op.FORWARD], OP_CODE[Op.BACKWARD_INPUT]))
    waiting: Integers = source[passes & (listing.op[listing.after] == OP_CODE[Op.RECEIVE])]
    return waiting
