"""Instructions of a list that cost the same: priced once, then spread over the list.

A list has thousands of instructions but few kinds of them: the same operation on the same units,
whatever the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tutti.schedule.instruction import Instruction, Op

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Kinds:
    """One instruction of each kind, and the kind of every instruction."""

    instructions: tuple[Instruction, ...]
    examples: tuple[Instruction, ...]
    codes: npt.NDArray[np.intp]
    after_receive: npt.NDArray[np.intp]  # the passes that wait for a Receive, once per Receive

    @classmethod
    def of(cls, instructions: tuple[Instruction, ...]) -> Kinds:
        """Sort a list's instructions by kind."""
        known: dict[object, int] = {}
        examples: list[Instruction] = []
        codes: list[int] = []
        for entry in instructions:
            op, micro_batch, start, stop, what, scope, _ = entry
            code = known.setdefault((op, start, stop, what, scope, micro_batch < 0), len(known))
            if code == len(examples):
                examples.append(entry)
            codes.append(code)
        return cls(
            instructions,
            tuple(examples),
            np.array(codes, dtype=np.intp),
            _after_receive(instructions),
        )

    def spread(self, figure: Callable[[Instruction], float]) -> FloatArray:
        """Return a figure of every instruction, asked for once per kind."""
        table = np.array([figure(example) for example in self.examples], dtype=np.float64)
        return table[self.codes] if len(table) else np.zeros(0)


def _after_receive(entries: tuple[Instruction, ...]) -> npt.NDArray[np.intp]:
    received = {index for index, entry in enumerate(entries) if entry.op is Op.RECEIVE}
    passes = (Op.FORWARD, Op.BACKWARD_INPUT)
    waiting = [
        index
        for index, entry in enumerate(entries)
        if entry.after and entry.op in passes
        for wanted in entry.after
        if wanted in received
    ]
    return np.array(waiting, dtype=np.intp)
