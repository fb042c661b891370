"""Steps whose tokens have not come, and which of their samples belong to guesses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tutti.batching.step import I32


@dataclass(frozen=True, slots=True, eq=False)
class StepInFlight:
    """A step whose tokens have not come."""

    number: int
    slots: I32  # rows and forks, each once
    ends: I32  # how far each is computed after it
    sample_slots: I32
    guesses: dict[int, tuple[int, ...]]  # by slot; their samples stand together, in order


def with_guesses(
    rows: I32, sample_slots: I32, slots: I32, guesses: Mapping[int, tuple[int, ...]]
) -> tuple[I32, I32, I32]:
    """Return samples with those after each guess, and how far before its row's end each is."""
    if not guesses:
        return rows, sample_slots, np.zeros(len(rows), np.int32)
    more_rows, more_slots, offsets = [], [], [0] * len(rows)
    places = {slot: row for row, slot in enumerate(slots.tolist())} if guesses else {}
    for slot, tokens in guesses.items():
        count = len(tokens) + 1
        more_rows += [places[slot]] * count
        more_slots += [slot] * count
        offsets += range(count - 1, -1, -1)
    return (
        np.concatenate((rows, np.array(more_rows, np.int32))),
        np.concatenate((sample_slots, np.array(more_slots, np.int32))),
        np.array(offsets, np.int32),
    )
