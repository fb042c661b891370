"""Micro-batches share a slot only if they are never in flight together."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.support.any_plan import PLANS
from tutti.schedule.instruction import Instruction, Op
from tutti.schedule.schedule import build_schedule
from tutti.schedule.slots import all_slots, micro_batch_slots

PASSES = (Op.FORWARD, Op.RECOMPUTE, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
CHUNK = (0, 4)


def passes(text: str) -> list[Instruction]:
    """A list out of words such as F0 B0 W0."""
    ops = {"F": Op.FORWARD, "B": Op.BACKWARD_INPUT, "W": Op.BACKWARD_WEIGHT}
    return [Instruction(ops[word[0]], int(word[1:]), *CHUNK) for word in text.split()]


def in_flight(entries: Sequence[Instruction], chunk: tuple[int, int]) -> list[set[int]]:
    """The micro-batches that are in flight on a chunk at each of its passes."""
    own = [e for e in entries if e.op in PASSES and e.start < chunk[1] and e.stop > chunk[0]]
    numbers = [e.micro_batch for e in own]
    return [{m for m in set(numbers) if m in numbers[: i + 1] and m in numbers[i:]}
            for i in range(len(numbers))]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("F0 B0 W0 F1 B1 W1 F2 B2 W2", {0: 0, 1: 0, 2: 0}),
        ("F0 F1 F2 B0 W0 B1 W1 B2 W2", {0: 0, 1: 1, 2: 2}),
        ("F0 F1 B0 W0 F2 B1 W1 F3 B2 W2 B3 W3", {0: 0, 1: 1, 2: 0, 3: 1}),
        # a weight pass that is late keeps its micro-batch in flight
        ("F0 F1 B0 F2 B1 W1 B2 W0 W2", {0: 0, 1: 1, 2: 2}),
    ],
)
def test_slots_of_a_list(text: str, expected: dict[int, int]) -> None:
    assert micro_batch_slots(passes(text), CHUNK) == expected


@pytest.mark.parametrize("name", PLANS)
def test_slots_of_any_schedule(name: str) -> None:
    plan = PLANS[name]
    for rank_class in build_schedule(plan).classes:
        stage = plan.pipelines[rank_class.pipeline].stages[rank_class.stage]
        slots = all_slots(rank_class.instructions, stage.units)
        for chunk in stage.units:
            flying = in_flight(rank_class.instructions, chunk)
            for together in flying:
                assert len({slots[chunk, m] for m in together}) == len(together)
            used = {slot for (own, _), slot in slots.items() if own == chunk}
            assert used == set(range(max(map(len, flying)))), "no more slots than are needed"
