"""Instruction lists as columns of numbers, and whole-list questions answered on them at once.

Each question asks whether a list is beyond doubt; a "no" means only that somebody has to look at
its instructions one by one (`check`), who then says in words what is wrong, if anything is.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tutti.plan.plan import ChunkPlace, UnitRanges
from tutti.schedule.instruction import Instruction, Op, What
from tutti.schedule.listing import OP_CODE, OPS, WHAT_CODE, WHATS, Integers, listing_of

Mask = npt.NDArray[np.bool_]

_BRINGS = np.array([op in (Op.GATHER_PARAMETERS, Op.FETCH, Op.RECEIVE) for op in OPS])


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """One list; `source` and `target` are its dependencies: source waits for target."""

    op: Integers
    micro_batch: Integers
    start: Integers
    stop: Integers
    what: Integers
    inside: Integers
    source: Integers
    target: Integers

    @classmethod
    def of(cls, instructions: Sequence[Instruction]) -> Columns:
        """Lay a list out."""
        listing = listing_of(instructions)
        return cls(
            op=listing.op,
            micro_batch=listing.micro_batch,
            start=listing.first,
            stop=listing.stop,
            what=listing.what,
            inside=listing.inside,
            source=listing.sources,
            target=listing.after,
        )

    def where(self, *ops: Op) -> Integers:
        """Return the positions of the instructions of some kinds."""
        chosen = self.op == OP_CODE[ops[0]]
        for op in ops[1:]:
            chosen |= self.op == OP_CODE[op]
        return np.flatnonzero(chosen)

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
        codes = np.sort(self._codes(at, self.op[at], micro_batches))
        expected: list[Integers] = []
        counted = np.arange(micro_batches, dtype=np.int64)
        for lower, upper in itertools.pairwise(path):
            if lower.stage == upper.stage or stage not in (lower.stage, upper.stage):
                continue
            up, down = (Op.SEND, Op.RECEIVE) if stage == lower.stage else (Op.RECEIVE, Op.SEND)
            for op, what in ((up, What.ACTIVATIONS), (down, What.GRADIENTS)):
                place = (OP_CODE[op] * len(WHATS) + WHAT_CODE[what]) * (1 << 20) + upper.start
                expected.append(place * micro_batches + counted)
        wanted = np.sort(np.concatenate(expected)) if expected else np.zeros(0, dtype=np.int64)
        return (
            np.array_equal(codes, wanted)
            and bool(((self.micro_batch[at] >= 0) & (self.start[at] >= 0)).all())
            and bool((self.start[at] < 1 << 20).all())
            and self._sends_wait()
            and self._passes_wait(micro_batches)
        )

    def _codes(self, at: Integers, op: Integers | int, many: int) -> Integers:
        place = (op * len(WHATS) + self.what[at]) * (1 << 20) + self.start[at]
        codes: Integers = place * many + self.micro_batch[at]
        return codes

    def _sends_wait(self) -> bool:
        """Tell whether every Send waits for the pass that makes what it carries."""
        sends = self.where(Op.SEND)
        edges = self.op[self.source] == OP_CODE[Op.SEND]
        send, made = self.source[edges], self.target[edges]
        forward = (self.op[made] == OP_CODE[Op.FORWARD]) & (self.stop[made] == self.start[send])
        back = (self.op[made] == OP_CODE[Op.BACKWARD_INPUT]) & (
            self.start[made] == self.start[send]
        )
        up = self.what[send] == WHAT_CODE[What.ACTIVATIONS]
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
            received = received[self.what[received] == WHAT_CODE[what]]
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
