"""The interpreter: runs any program on numpy arrays, one rank after the other in one process.

It is the reference that `comm` is tested against, and the proof on real numbers of what `check`
proves on symbols. Each seat keeps every section at the place of its number, and a mask of what it
holds, so that reading what is not there is found at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tutti.collective.check import ProgramError, Reason
from tutti.collective.expand import in_chunk, rounds
from tutti.collective.layout import Layout, held_after, held_before
from tutti.collective.program import CollectiveProgram, Round, Transfer
from tutti.collective.slices import Part
from tutti.collective.traffic import Traffic
from tutti.errors import InputError

Array = NDArray[Any]
Reduction = Callable[[Array, Array], Array]


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """Every rank's output buffer, and what went over which wire."""

    outputs: dict[int, Array]
    traffic: Traffic


def interpret(
    program: CollectiveProgram,
    inputs: Mapping[int, Array],
    counts: int | Sequence[int],
    *,
    reduction: Reduction = np.add,
) -> Outcome:
    """Run a program; inputs and outputs are one-dimensional arrays by rank.

    A rank that brings nothing (all but the root of a broadcast) may be left out of `inputs`;
    `counts` as in `Layout.of`.
    """
    memory = _Memory(program, inputs, Layout.of(program, counts))
    traffic = Traffic(program.group)
    for chunk, index in program.issue_order():
        for one in rounds(program, program.steps[index]):
            memory.play(one, chunk, traffic, reduction)
    outputs = {rank: memory.output(seat) for seat, rank in enumerate(program.group.ranks)}
    return Outcome(outputs, traffic)


class _Memory:
    """What every seat holds."""

    def __init__(
        self, program: CollectiveProgram, inputs: Mapping[int, Array], layout: Layout
    ) -> None:
        self._program = program
        self._layout = layout
        lengths = [layout.count(section) for section in range(layout.num_sections)]
        self._starts = [0, *accumulate(lengths)]
        size, total = program.group.size, self._starts[-1]
        dtype = next(iter(inputs.values()), np.zeros(0)).dtype
        self._values = np.zeros((size, total), dtype)
        self._held = np.zeros((size, total), bool)
        for seat, rank in enumerate(program.group.ranks):
            self._fill(seat, rank, inputs.get(rank, np.zeros(0, dtype)))

    def _places(self, section: int, start: int, stop: int) -> slice:
        return slice(self._starts[section] + start, self._starts[section] + stop)

    def _fill(self, seat: int, rank: int, given: Array) -> None:
        at = 0
        for section in held_before(self._program, seat):
            count = self._layout.count(section)
            if given.shape[0] < at + count:
                raise InputError(f"{self._program}: rank {rank} brings {given.shape[0]} elements")
            places = self._places(section, 0, count)
            self._values[seat, places] = given[at : at + count]
            self._held[seat, places] = True
            at += count
        if at != given.shape[0]:
            raise InputError(
                f"{self._program}: rank {rank} brings {given.shape[0]} elements; {at} are due"
            )

    def output(self, seat: int) -> Array:
        """Return a seat's output buffer."""
        sections = [self._values[seat, :0]]
        for section in held_after(self._program, seat):
            places = self._places(section, 0, self._layout.count(section))
            if not self._held[seat, places].all():
                rank = self._program.group.ranks[seat]
                raise ProgramError(Reason.RESULT, f"rank {rank} never gets section {section}")
            sections.append(self._values[seat, places])
        return np.concatenate(sections)

    def _slices(self, part: Part, chunk: int) -> Iterator[slice]:
        for piece in in_chunk(part, chunk, self._program.chunks):
            for section in piece.sections:
                start, stop = piece.bounds(self._layout.count(section))
                if stop > start:
                    yield self._places(section, start, stop)

    def play(self, one: Round, chunk: int, traffic: Traffic, reduction: Reduction) -> None:
        """Run one round: all read first, then all take effect in their order."""
        messages = [(t, self._read(t, chunk)) for t in one]
        for transfer, message in messages:
            elements = sum(len(values) for _, values in message)
            traffic.add(transfer.source, transfer.target, elements)
            for places, values in message:
                own = self._values[transfer.target, places]
                self._values[transfer.target, places] = (
                    reduction(own, values) if transfer.reduce else values
                )
                self._held[transfer.target, places] = True

    def _read(self, transfer: Transfer, chunk: int) -> list[tuple[slice, Array]]:
        payload = []
        for places in self._slices(transfer.part, chunk):
            if not self._held[transfer.source, places].all():
                rank = self._program.group.ranks[transfer.source]
                raise ProgramError(Reason.MISSING, f"rank {rank} sends what it does not hold")
            payload.append((places, self._values[transfer.source, places].copy()))
        return payload
