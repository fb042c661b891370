"""The forward half of a step: what a validation loss takes, in the order that training has.

Kept are the forward passes, the activations they send and receive, what they wait for (tokens,
parameters from the host or from other holders), and the reduction of scalars at the end. All ranks
leave out the same meetings, so that what could not hang cannot hang now.
"""

from __future__ import annotations

from collections.abc import Sequence

from tutti.schedule.instruction import Instruction, Op, What
from tutti.schedule.schedule import RankClass, Schedule

_BRINGS = (Op.FETCH, Op.GATHER_PARAMETERS)


def forward_list(instructions: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """Return the instructions of a list that a forward pass alone needs."""
    entries = list(instructions)
    needed = {
        index
        for entry in entries
        if entry.op is Op.FORWARD
        for index in entry.after
        if entries[index].op in _BRINGS
    }
    places: dict[int, int] = {}  # where a kept instruction stands now
    kept: list[Instruction] = []
    for index, entry in enumerate(entries):
        moves = entry.op in (Op.SEND, Op.RECEIVE) and entry.what is What.ACTIVATIONS
        if entry.op in (Op.FORWARD, Op.CLIP_NORM) or moves or index in needed:
            places[index] = len(kept)
            after = tuple(places[earlier] for earlier in entry.after if earlier in places)
            kept.append(entry._replace(after=after))
    return tuple(kept)


def forward_schedule(schedule: Schedule) -> Schedule:
    """Return the forward half of all classes."""
    made: dict[int, tuple[Instruction, ...]] = {}
    for c in schedule.classes:
        if id(c.instructions) not in made:
            made[id(c.instructions)] = forward_list(c.instructions)
    return Schedule(
        schedule.plan,
        tuple(
            RankClass(c.pipeline, c.stage, c.replica, c.num_ranks, made[id(c.instructions)])
            for c in schedule.classes
        ),
        schedule.buckets,
    )
