"""Appends instructions to a list and remembers what later ones wait for."""

from __future__ import annotations

from tutti.schedule.instruction import NO_MICRO_BATCH, Instruction, Op, Scope, What
from tutti.schedule.tape import Tape

make_tuple = tuple.__new__  # what `_make` of a named tuple calls; hundreds of thousands are made


class Emitter:
    """One growing instruction list, written block by block.

    Gathers and fetches wait for the pass before the previous one only (`ahead`), so that they run
    one pass ahead of their use: one buffer in use, one being filled.
    """

    def __init__(self) -> None:
        self.tape = Tape()
        self.place = 0  # where the block that is being written begins
        self.out: list[Instruction] = []  # the block
        self.last_weights = -1  # the last weight pass
        self._previous = self._before_previous = -1  # the last two compute instructions
        # What empties buffers, by what lies in them: the last two.
        kinds = (What.ACTIVATIONS, What.GRADIENTS, What.OPTIMIZER)
        self._leaving = dict.fromkeys(kinds, (-1, -1))
        # What the last block left that later instructions may wait for, by distance from its end.
        self.left: tuple[int, ...] = (1,) * 7
        self.left_place = 0

    @property
    def next_index(self) -> int:
        """Where the next instruction will stand."""
        return self.place + len(self.out)

    def close(self, micro_batch: int = NO_MICRO_BATCH) -> int:
        """End the block; return its number, by which it can be played again."""
        block = self.tape.record(self.out, self.place)
        self.place = here = self.tape.play(block, self.place, micro_batch)
        self.out = []
        away, gone = self._leaving[What.ACTIVATIONS], self._leaving[What.GRADIENTS]
        self.left_place, self.left = (
            here,
            tuple(
                index - here if index >= 0 else 1
                for index in (
                    self._previous,
                    self._before_previous,
                    *away,
                    *gone,
                    self.last_weights,
                )
            ),
        )
        return block

    def insert(self, instruction: Instruction, micro_batch: int) -> int:
        """Write one instruction that no later one waits for by its place; return its block."""
        block = self.tape.record([instruction], self.place)
        self.place = self.tape.play(block, self.place, micro_batch)
        return block

    def play(self, block: int, micro_batch: int, left: tuple[int, ...]) -> None:
        """Let a block stand here once more; `left` is what it left behind at its first time."""
        self.left_place = self.place = self.tape.play(block, self.place, micro_batch)
        self.left = left

    def resume(self) -> None:
        """Go on writing behind blocks that were played."""
        here = self.left_place
        before = [here + distance if distance <= 0 else -1 for distance in self.left]
        self._previous, self._before_previous = before[0], before[1]
        self._leaving[What.ACTIVATIONS] = (before[2], before[3])
        self._leaving[What.GRADIENTS] = (before[4], before[5])
        self.last_weights = before[6]

    def emit(
        self,
        op: Op,
        *,
        micro_batch: int = NO_MICRO_BATCH,
        start: int = 0,
        stop: int = 0,
        what: What = What.NOTHING,
        scope: Scope = Scope.ALL,
        after: tuple[int, ...] = (),
    ) -> int:
        """Append an instruction; return its index."""
        fields = (op, micro_batch, start, stop, what, scope, after)
        self.out.append(make_tuple(Instruction, fields))
        return self.next_index - 1

    def compute(
        self, op: Op, micro_batch: int, start: int, stop: int, after: tuple[int, ...] = ()
    ) -> int:
        """Append a pass; return its index."""
        index = self.place + len(self.out)
        fields = (op, micro_batch, start, stop, What.NOTHING, Scope.ALL, after)
        self.out.append(make_tuple(Instruction, fields))
        self._before_previous, self._previous = self._previous, index
        if op is Op.BACKWARD_WEIGHT:
            self.last_weights = index
        return index

    def leaves(self, what: What, index: int) -> int:
        """Note that an instruction empties a buffer that a later pass fills anew."""
        self._leaving[what] = (self._leaving[what][1], index)
        return index

    def room(self, what: What) -> tuple[int, ...]:
        """What a pass that fills such a buffer waits for: one is filled, one being emptied."""
        before = self._leaving[what][0]
        return (before,) if before >= 0 else ()

    @property
    def ahead(self) -> tuple[int, ...]:
        """What something that runs one pass ahead waits for."""
        return (self._before_previous,) if self._before_previous >= 0 else ()

    def fetch(
        self, what: What, micro_batch: int, start: int, stop: int, after: tuple[int, ...] = ()
    ) -> int:
        """Bring something from host memory, one pass ahead."""
        return self.emit(
            Op.FETCH,
            micro_batch=micro_batch,
            start=start,
            stop=stop,
            what=what,
            after=waits(self.ahead, after),
        )

    def offload(
        self, what: What, micro_batch: int, start: int, stop: int, after: tuple[int, ...]
    ) -> int:
        """Move something to host memory."""
        return self.emit(
            Op.OFFLOAD, micro_batch=micro_batch, start=start, stop=stop, what=what, after=after
        )


def waits(*groups: tuple[int, ...] | list[int]) -> tuple[int, ...]:
    """Return the distinct indices of several groups, in order."""
    return tuple(sorted({index for group in groups for index in group}))
