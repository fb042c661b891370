"""Blocks of instructions that are written once and played many times.

What a rank does for one pass is the same for most micro-batches: the same instructions, waiting
for others at the same distance. The writer records such a block once; afterwards only its number,
its place in the list and its micro-batch are noted, and the columns are filled in at the end.
"""

from __future__ import annotations

import numpy as np

from tutti.schedule.instruction import Instruction
from tutti.schedule.listing import Integers, Listing


class Tape:
    """The blocks of one list, and where each is played."""

    def __init__(self) -> None:
        self._recorded: list[Instruction] = []  # all blocks, one after the other
        self._blocks: list[tuple[int, int, int]] = []  # start, length, place when recorded
        self._played: list[tuple[int, int, int]] = []  # block, place, micro-batch

    def record(self, instructions: list[Instruction], place: int) -> int:
        """Keep a block as it was written at a place of the list; return its number."""
        self._blocks.append((len(self._recorded), len(instructions), place))
        self._recorded += instructions
        return len(self._blocks) - 1

    def play(self, block: int, place: int, micro_batch: int) -> int:
        """Let a block stand at a place; return where the next one stands.

        Its instructions that have a micro-batch have this one; what they wait for is as far away
        as it was when the block was recorded.
        """
        self._played.append((block, place, micro_batch))
        return place + self._blocks[block][1]

    def listing(self) -> Listing:
        """Return the whole list."""
        pool = Listing.of(self._recorded)
        start, length, origin = np.array(self._blocks, dtype=np.int64).reshape(-1, 3).T
        block, place, micro_batch = np.array(self._played, dtype=np.int64).reshape(-1, 3).T
        at = _runs(start[block], length[block])
        micro = pool.micro_batch[at]
        counts = pool.after_counts[at]
        edges = pool.offsets[start + length] - pool.offsets[start]  # per block
        waited = _runs(pool.offsets[start[block]], edges[block])
        moved = np.repeat(place - origin[block], edges[block])
        return Listing(
            pool.op[at],
            np.where(micro < 0, micro, np.repeat(micro_batch, length[block])),
            pool.first[at],
            pool.stop[at],
            pool.what[at],
            pool.inside[at],
            counts,
            pool.after[waited] + moved,
        )


def _runs(starts: Integers, lengths: Integers) -> Integers:
    """Return start, start + 1, … for every run, one run after the other."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(total, dtype=np.int64)
