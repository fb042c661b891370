"""Which micro-batches may use the same memory, as a list's order says: a colouring of intervals.

A micro-batch is in flight on a chunk of units from its first Forward there to its last
BackwardWeight. Two that are in flight at the same time need two slots; one that begins when another
is over takes its slot. As many slots are needed as micro-batches are ever in flight at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tutti.schedule.instruction import Instruction, Op

Units = tuple[int, int]  # half-open


def micro_batch_slots(instructions: Iterable[Instruction], chunk: Units) -> dict[int, int]:
    """Return the slot of each micro-batch on a chunk of units, counted from 0."""
    passes = [
        entry
        for entry in instructions
        if entry.op in (Op.FORWARD, Op.RECOMPUTE, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
        and entry.start < chunk[1]
        and entry.stop > chunk[0]
    ]
    last = {entry.micro_batch: index for index, entry in enumerate(passes)}
    slots: dict[int, int] = {}
    taken: set[int] = set()
    for index, entry in enumerate(passes):
        micro_batch = entry.micro_batch
        if micro_batch not in slots:
            slot = next(s for s in range(len(taken) + 1) if s not in taken)
            slots[micro_batch] = slot
            taken.add(slot)
        if last[micro_batch] == index:
            taken.discard(slots[micro_batch])
    return slots


def all_slots(
    instructions: Sequence[Instruction], chunks: Sequence[Units]
) -> dict[tuple[Units, int], int]:
    """Return the slot of each (chunk, micro-batch) of a rank; every chunk has slots of its own."""
    return {
        (chunk, micro_batch): slot
        for chunk in chunks
        for micro_batch, slot in micro_batch_slots(instructions, chunk).items()
    }
