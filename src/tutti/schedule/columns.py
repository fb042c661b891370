"""Instruction lists as columns of numbers, and whole-list questions answered on them at once.

Each question asks whether a list is beyond doubt; a "no" means only that somebody has to look at
its instructions one by one (`check`), who then says in words what is wrong, if anything is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tutti.plan.plan import ChunkPlace, UnitRanges
from tutti.schedule.instruction import Instruction, Op, What

Integers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_OPS, _WHATS = tuple(Op), tuple(What)
CODE = {op: code for code, op in enumerate(_OPS)}
_WHAT = {what: code for code, what in enumerate(_WHATS)}
# Members of an enum are hashed by Python code; their identities are not.
_OP_BY_ID = {id(op): code for op, code in CODE.items()}
_WHAT_BY_ID = {id(what): code for what, code in _WHAT.items()}
_BRINGS = np.array([op in (Op.GATHER_PARAMETERS, Op.FETCH, Op.RECEIVE) for op in _OPS])


def _integers(values: Iterable[Any], count: int = -1) -> Integers:
    return np.fromiter(values, dtype=np.int64, count=count)


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """One list; `source` and `target` are its dependencies: source waits for target."""

    op: Integers
    micro_batch: Integers
    start: Integers
    stop: Integers
    what: Integers
    source: Integers
    target: Integers

    @classmethod
    def of(cls, instructions: tuple[Instruction, ...]) -> Columns:
        """Transpose a list."""
        size = len(instructions)
        if not size:
            return cls(*(np.zeros(0, dtype=np.int64) for _ in range(7)))
        op, micro_batch, start, stop, what, _, after = zip(*instructions, strict=True)
        counts = _integers(map(len, after), size)
        return cls(
            op=_integers(map(_OP_BY_ID.__getitem__, map(id, op)), size),
            micro_batch=_integers(micro_batch, size),
            start=_integers(start, size),
            stop=_integers(stop, size),
            what=_integers(map(_WHAT_BY_ID.__getitem__, map(id, what)), size),
            source=np.repeat(np.arange(size, dtype=np.int64), counts),
            target=_integers(itertools.chain.from_iterable(after)),
        )

    def where(self, *ops: Op) -> Integers:
        """Return the positions of the instructions of some kinds."""
        found = self.op == CODE[ops[0]]
        for op in ops[1:]:
            found |= self.op == CODE[op]
        return np.flatnonzero(found)

    def waits_for_earlier(self) -> bool:
        """Tell whether every dependency stands before what waits for it."""
        return bool(((self.target >= 0) & (self.target < self.source)).all())

    def is_waited_for(self) -> bool:
        """Tell whether something waits for whatever brings something."""
        waited = np.zeros(len(self.op), dtype=np.bool_)
        waited[self.target] = True
        return bool(waited[_BRINGS[self.op]].all())

    # --- passes --------------------------------------------------------------------------

    def passes_fit(self, units: UnitRanges, micro_batches: int) -> bool:
        """Tell whether every unit has its passes once per micro-batch, in order."""
        reached: list[Integers] = []
        for op in (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT):
            at = self.where(op)
            if not self._walks(at, units, micro_batches, up=op is Op.FORWARD):
                return False
            reached.append(self._positions(at, micro_batches))
        forward, by_input, by_weight = reached
        same = len(forward) == len(by_input) == len(by_weight)
        return same and bool(((forward < by_input) & (by_input < by_weight)).all())

    def _walks(self, at: Integers, units: UnitRanges, many: int, *, up: bool) -> bool:
        """Tell whether passes go through each chunk without gap, once per micro-batch."""
        bounds = np.array(sorted(units), dtype=np.int64)
        micro_batch, start, stop = self.micro_batch[at], self.start[at], self.stop[at]
        chunk = np.searchsorted(bounds[:, 0], start, side="right") - 1
        if not len(at) or chunk.min() < 0 or micro_batch.min() < 0 or micro_batch.max() >= many:
            return False
        order = np.argsort(chunk * many + micro_batch, kind="stable")
        key = (chunk * many + micro_batch)[order]
        if not up:
            start, stop = -stop, -start
        begins, ends = start[order], stop[order]
        first = np.concatenate([[True], key[1:] != key[:-1]])
        last = np.concatenate([first[1:], [True]])
        low, high = bounds[chunk[order]].T if up else -bounds[chunk[order]].T[::-1]
        return bool(
            (ends > begins).all()
            and first.sum() == len(bounds) * many
            and (begins[first] == low[first]).all()
            and (ends[last] == high[last]).all()
            and (begins[1:] == ends[:-1])[~first[1:]].all()
        )

    def _positions(self, at: Integers, many: int) -> Integers:
        """Return where each unit's pass stands, by unit and micro-batch."""
        lengths = self.stop[at] - self.start[at]
        ahead = np.repeat(np.cumsum(lengths) - lengths, lengths)
        units = np.repeat(self.start[at], lengths) + np.arange(lengths.sum()) - ahead
        order = np.argsort(units * many + np.repeat(self.micro_batch[at], lengths), kind="stable")
        return np.repeat(at, lengths)[order]

    # --- sends and receives --------------------------------------------------------------

    def moves_fit(self, path: list[ChunkPlace], stage: int, micro_batches: int) -> bool:
        """Tell whether exactly the moves of a stage stand here, tied to their passes."""
        at = self.where(Op.SEND, Op.RECEIVE)
        found = np.sort(self._codes(at, self.op[at], micro_batches))
        expected: list[Integers] = []
        counted = np.arange(micro_batches, dtype=np.int64)
        for lower, upper in itertools.pairwise(path):
            if lower.stage == upper.stage or stage not in (lower.stage, upper.stage):
                continue
            up, down = (Op.SEND, Op.RECEIVE) if stage == lower.stage else (Op.RECEIVE, Op.SEND)
            for op, what in ((up, What.ACTIVATIONS), (down, What.GRADIENTS)):
                place = (CODE[op] * len(_WHATS) + _WHAT[what]) * (1 << 20) + upper.start
                expected.append(place * micro_batches + counted)
        wanted = np.sort(np.concatenate(expected)) if expected else np.zeros(0, dtype=np.int64)
        return (
            np.array_equal(found, wanted)
            and bool(((self.micro_batch[at] >= 0) & (self.start[at] >= 0)).all())
            and bool((self.start[at] < 1 << 20).all())
            and self._sends_wait()
            and self._passes_wait(micro_batches)
        )

    def _codes(self, at: Integers, op: Integers | int, many: int) -> Integers:
        place = (op * len(_WHATS) + self.what[at]) * (1 << 20) + self.start[at]
        found: Integers = place * many + self.micro_batch[at]
        return found

    def _sends_wait(self) -> bool:
        """Tell whether every Send waits for the pass that makes what it carries."""
        sends = self.where(Op.SEND)
        edges = self.op[self.source] == CODE[Op.SEND]
        send, made = self.source[edges], self.target[edges]
        forward = (self.op[made] == CODE[Op.FORWARD]) & (self.stop[made] == self.start[send])
        back = (self.op[made] == CODE[Op.BACKWARD_INPUT]) & (self.start[made] == self.start[send])
        up = self.what[send] == _WHAT[What.ACTIVATIONS]
        right = np.where(up, forward, back) & (self.micro_batch[made] == self.micro_batch[send])
        return len(np.unique(send[right])) == len(sends)

    def _passes_wait(self, many: int) -> bool:
        """Tell whether every pass that begins with a Receive waits for it."""
        edges = self.source * len(self.op) + self.target
        for op, what, place in (
            (Op.FORWARD, What.ACTIVATIONS, self.start),
            (Op.BACKWARD_INPUT, What.GRADIENTS, self.stop),
        ):
            received = self.where(Op.RECEIVE)
            received = received[self.what[received] == _WHAT[what]]
            code = self.start[received] * many + self.micro_batch[received]
            order = np.argsort(code)
            passes = self.where(op)
            wanted = place[passes] * many + self.micro_batch[passes]
            spot = np.searchsorted(code[order], wanted)
            spot[spot == len(code)] = 0
            meets = code[order][spot] == wanted if len(code) else np.zeros(len(passes), bool)
            pairs = passes[meets] * len(self.op) + received[order][spot[meets]]
            if not np.isin(pairs, edges).all():
                return False
        return True
