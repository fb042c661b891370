"""An instruction list as columns of numbers: what is written, checked, priced and simulated.

Lists are long and repeat themselves, so they are kept as arrays; an Instruction is made when one
is looked at. A plain tuple of Instructions is a list, too: `listing_of` transposes it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from tutti.schedule.instruction import Instruction, Op, Scope, What

Integers = npt.NDArray[np.int64]

OPS, WHATS = tuple(Op), tuple(What)
OP_CODE = {op: code for code, op in enumerate(OPS)}
WHAT_CODE = {what: code for code, what in enumerate(WHATS)}
# Members of an enum are hashed by Python code; their identities are not.
_OP_BY_ID = {id(op): code for op, code in OP_CODE.items()}
_WHAT_BY_ID = {id(what): code for what, code in WHAT_CODE.items()}
_SCOPES = (Scope.ALL, Scope.PIPELINE)
COLUMNS = ("op", "micro_batch", "first", "stop", "what", "inside")


def integers(values: Iterable[Any], count: int = -1) -> Integers:
    """Return numbers as a column."""
    return np.fromiter(values, dtype=np.int64, count=count)


class Listing(Sequence[Instruction]):
    """One instruction list; indices in `after` count inside the list."""

    __slots__ = (*COLUMNS, "_examples", "_kinds", "_offsets", "_whole", "after", "after_counts")

    def __init__(
        self,
        op: Integers,
        micro_batch: Integers,
        first: Integers,
        stop: Integers,
        what: Integers,
        inside: Integers,
        after_counts: Integers,
        after: Integers,
    ) -> None:
        self.op = op
        self.micro_batch = micro_batch
        self.first = first
        self.stop = stop
        self.what = what
        self.inside = inside  # 1: a collective among the holders of one pipeline
        self.after_counts = after_counts
        self.after = after
        self._whole: tuple[Instruction, ...] | None = None
        self._offsets: Integers | None = None
        self._kinds: tuple[Integers, Integers] | None = None
        self._examples: tuple[Instruction, ...] | None = None

    @classmethod
    def of(cls, instructions: Sequence[Instruction]) -> Listing:
        """Transpose a list without looking at its entries one by one."""
        size = len(instructions)
        if not size:
            return cls(*(np.zeros(0, dtype=np.int64) for _ in range(8)))
        op, micro_batch, first, stop, what, scope, after = zip(*instructions, strict=True)
        listing = cls(
            integers(map(_OP_BY_ID.__getitem__, map(id, op)), size),
            integers(micro_batch, size),
            integers(first, size),
            integers(stop, size),
            integers(map(_WHAT_BY_ID.__getitem__, map(id, what)), size),
            integers((s is Scope.PIPELINE for s in scope), size),
            integers(map(len, after), size),
            integers(itertools.chain.from_iterable(after)),
        )
        listing._whole = tuple(instructions)
        return listing

    @property
    def offsets(self) -> Integers:
        """Where the entries of `after` of each instruction begin; one more than instructions."""
        if self._offsets is None:
            self._offsets = np.concatenate([[0], np.cumsum(self.after_counts)]).astype(np.int64)
        return self._offsets

    @property
    def sources(self) -> Integers:
        """The instruction that waits, for each entry of `after`."""
        return np.repeat(np.arange(len(self), dtype=np.int64), self.after_counts)

    @property
    def kinds(self) -> tuple[Integers, Integers]:
        """The first instruction of every kind, and the kind of every instruction.

        One kind are those that differ in nothing but the micro-batch and what they wait for.
        """
        if self._kinds is None:
            code = (self.op * len(WHATS) + self.what) * 2 + self.inside
            code = code * 2 + (self.micro_batch < 0)
            for column in (self.first, self.stop):
                least = int(column.min(initial=0))
                code = code * (int(column.max(initial=0)) - least + 1) + column - least
            _, places, codes = np.unique(code, return_index=True, return_inverse=True)
            order = np.argsort(places)  # by first appearance
            rank = np.empty(len(order), dtype=np.int64)
            rank[order] = np.arange(len(order))
            self._kinds = (places[order].astype(np.int64), rank[codes.reshape(-1)])
        return self._kinds

    @property
    def examples(self) -> tuple[Instruction, ...]:
        """One instruction of every kind, in the order in which they appear."""
        if self._examples is None:
            places = self.kinds[0]
            columns = (getattr(self, name)[places].tolist() for name in COLUMNS)
            bounds = zip(
                self.offsets[places].tolist(), self.offsets[places + 1].tolist(), strict=True
            )
            after = [tuple(self.after[low:high].tolist()) for low, high in bounds]
            self._examples = tuple(
                Instruction(OPS[op], mb, first, stop, WHATS[what], _SCOPES[inside], waits)
                for op, mb, first, stop, what, inside, waits in zip(*columns, after, strict=True)
            )
        return self._examples

    def where(self, *ops: Op) -> Integers:
        """Return the positions of the instructions of some operations."""
        chosen = self.op == OP_CODE[ops[0]]
        for op in ops[1:]:
            chosen |= self.op == OP_CODE[op]
        return np.flatnonzero(chosen)

    def _entry(self, index: int) -> Instruction:
        low, high = self.offsets[index], self.offsets[index + 1]
        return Instruction(
            OPS[self.op[index]],
            int(self.micro_batch[index]),
            int(self.first[index]),
            int(self.stop[index]),
            WHATS[self.what[index]],
            _SCOPES[self.inside[index]],
            tuple(self.after[low:high].tolist()),
        )

    @property
    def whole(self) -> tuple[Instruction, ...]:
        """All instructions, made when first asked for."""
        if self._whole is None:
            bounds, after = self.offsets.tolist(), self.after.tolist()
            self._whole = tuple(
                map(
                    Instruction,
                    map(OPS.__getitem__, self.op.tolist()),
                    self.micro_batch.tolist(),
                    self.first.tolist(),
                    self.stop.tolist(),
                    map(WHATS.__getitem__, self.what.tolist()),
                    map(_SCOPES.__getitem__, self.inside.tolist()),
                    (tuple(after[a:b]) for a, b in itertools.pairwise(bounds)),
                )
            )
        return self._whole

    def __len__(self) -> int:
        return len(self.op)

    @overload
    def __getitem__(self, index: int) -> Instruction: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Instruction, ...]: ...
    def __getitem__(self, index: int | slice) -> Instruction | tuple[Instruction, ...]:
        if isinstance(index, slice):
            return self.whole[index]
        if self._whole is not None:
            return self._whole[index]
        return self._entry(range(len(self))[index])

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.whole)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Listing):
            return self.whole == other.whole
        return self.whole == other

    def __hash__(self) -> int:
        return hash(self.whole)


def listing_of(instructions: Sequence[Instruction]) -> Listing:
    """Return a list as columns."""
    return instructions if isinstance(instructions, Listing) else Listing.of(instructions)
