"""Appends instructions to a list and remembers what later ones wait for."""

from __future__ import annotations

from tutti.schedule.instruction import NO_MICRO_BATCH, Instruction, Op, Scope, What

make_tuple = tuple.__new__  # what `_make` of a named tuple calls; hundreds of thousands are made


class Emitter:
    """One growing instruction list.

    Gathers and fetches wait for the pass before the previous one only (`ahead`), so that they run
    one pass ahead of their use: one buffer in use, one being filled.
    """

    def __init__(self) -> None:
        self.out: list[Instruction] = []
        self._previous = self._before_previous = -1  # the last two compute instructions
        self._leaving: dict[What, list[int]] = {}  # what empties buffers, by what lies in them

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
        self.out.append(Instruction(op, micro_batch, start, stop, what, scope, after))
        return len(self.out) - 1

    def compute(
        self, op: Op, micro_batch: int, start: int, stop: int, after: tuple[int, ...] = ()
    ) -> int:
        """Append a pass; return its index."""
        index = len(self.out)
        fields = (op, micro_batch, start, stop, What.NOTHING, Scope.ALL, after)
        self.out.append(make_tuple(Instruction, fields))
        self._before_previous, self._previous = self._previous, index
        return index

    def leaves(self, what: What, index: int) -> int:
        """Note that an instruction empties a buffer that a later pass fills anew."""
        self._leaving.setdefault(what, []).append(index)
        return index

    def room(self, what: What) -> tuple[int, ...]:
        """What a pass that fills such a buffer waits for: one is filled, one being emptied."""
        left = self._leaving.get(what, [])
        return (left[-2],) if len(left) > 1 else ()

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
