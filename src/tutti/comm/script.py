"""Script: what one rank does for one program and one size, compiled to ranges of its buffers.

A program speaks of seats and exact fractions; a script of ranks and elements. It is made once per
(program, sizes) and used again. Three buffers: what the caller brings (`INPUT`), what it gets
(`OUTPUT`), and `SCRATCH` for what a rank only forwards. A section that is brought and kept begins
as a copy of the input in the output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from tutti.collective import (
    CollectiveProgram,
    Edge,
    Layout,
    LocalRound,
    Part,
    Pattern,
    Step,
    Team,
    Transfer,
    held_after,
    held_before,
    in_chunk,
    seat_rounds,
)
from tutti.collective.program import Action

INPUT, OUTPUT, SCRATCH = 0, 1, 2

Range = tuple[int, int, int]  # buffer, first element, the one after the last


@dataclass(frozen=True, slots=True)
class Move:
    """A message to or from a rank."""

    peer: int
    index: int  # among those of the same pair in the same round
    ranges: tuple[Range, ...]
    elements: int
    reduce: bool
    crosses: bool  # between islands
    ordered: bool = False  # takes effect in its turn, after what is sent was read


@dataclass(frozen=True, slots=True)
class RoundScript:
    """What a rank sends and receives in a round; receives take effect in their order."""

    number: int  # among all rounds of the team, also those in which this rank is idle
    sends: tuple[Move, ...]
    receives: tuple[Move, ...]


@dataclass(frozen=True, slots=True)
class NativeCall:
    """One call of the island's library: the team's ranks, and each one's ranges here."""

    action: Action
    ranks: tuple[int, ...]
    parts: tuple[tuple[Range, ...], ...]  # per member; for all_to_all what goes to each
    lengths: tuple[int, ...] = ()  # elements per member
    arriving: tuple[tuple[Range, ...], ...] = ()  # for all_to_all what comes from each


@dataclass(frozen=True, slots=True)
class TeamScript:
    """One team's part of a step: rounds, or a native call."""

    number: int
    rounds: tuple[RoundScript, ...] = ()
    native: NativeCall | None = None


@dataclass(frozen=True, slots=True)
class StepScript:
    """One step of one chunk; `after` are indices into the script."""

    chunk: int
    step: int
    name: str
    after: tuple[int, ...]
    teams: tuple[TeamScript, ...]


@dataclass(frozen=True, slots=True)
class Script:
    """Everything that one rank does."""

    steps: tuple[StepScript, ...]  # in the order in which all ranks issue them
    copies: tuple[tuple[Range, Range], ...]  # at the start: from input to output
    input_elements: int
    output_elements: int
    scratch_elements: int
    first_steps: tuple[tuple[int, ...], ...]  # per chunk: those that wait for nothing

    @property
    def last_chunk(self) -> int:
        """The number of the last chunk."""
        return len(self.first_steps) - 1


class _Places:
    """Where a rank keeps each section; sections it only forwards are placed as they come up."""

    def __init__(self, program: CollectiveProgram, seat: int, layout: Layout) -> None:
        self._layout = layout
        self._at: dict[int, tuple[int, int]] = {}
        self.input_elements = self._lay(INPUT, held_before(program, seat))
        brought = dict(self._at)
        self.output_elements = self._lay(OUTPUT, held_after(program, seat))
        self.scratch_elements = 0
        self.copies = tuple(
            (self._range(brought[s], layout.count(s)), self._range(self._at[s], layout.count(s)))
            for s in held_after(program, seat)
            if s in brought and layout.count(s)
        )

    def _lay(self, buffer: int, sections: Sequence[int]) -> int:
        counts = [self._layout.count(section) for section in sections]
        starts = [0, *accumulate(counts)]
        for section, start in zip(sections, starts, strict=False):
            self._at[section] = (buffer, start)
        return starts[-1]

    @staticmethod
    def _range(place: tuple[int, int], count: int) -> Range:
        return (place[0], place[1], place[1] + count)

    def ranges(self, part: Part) -> tuple[Range, ...]:
        """Return where a part lies, neighbours joined."""
        ranges: list[Range] = []
        for piece in part:
            for section in piece.sections:
                start, stop = piece.bounds(self._layout.count(section))
                if stop == start:
                    continue
                buffer, at = self._place(section)
                one = (buffer, at + start, at + stop)
                if ranges and ranges[-1][0] == buffer and ranges[-1][2] == one[1]:
                    ranges[-1] = (buffer, ranges[-1][1], one[2])
                else:
                    ranges.append(one)
        return tuple(ranges)

    def _place(self, section: int) -> tuple[int, int]:
        if section not in self._at:
            self._at[section] = (SCRATCH, self.scratch_elements)
            self.scratch_elements += self._layout.count(section)
        return self._at[section]


def compile_script(
    program: CollectiveProgram, seat: int, layout: Layout, *, native: bool = False
) -> Script:
    """Return what a seat does; `native` says that its island has a library of its own."""
    compiler = _Compiler(program, seat, layout, native)
    steps = tuple(compiler.steps())
    places = compiler.places
    return Script(
        steps=steps,
        copies=places.copies,
        input_elements=places.input_elements,
        output_elements=places.output_elements,
        scratch_elements=places.scratch_elements,
        first_steps=tuple(
            tuple(n for n, step in enumerate(steps) if step.chunk == chunk and not step.after)
            for chunk in range(program.chunks)
        ),
    )


class _Compiler:
    def __init__(self, program: CollectiveProgram, seat: int, layout: Layout, native: bool) -> None:
        self._program = program
        self._seat = seat
        self._layout = layout
        self._native = native
        self.places = _Places(program, seat, layout)
        self._rounds = [seat_rounds(program, step, seat) for step in program.steps]

    def steps(self) -> Iterator[StepScript]:
        """Yield the steps in issue order."""
        number: dict[tuple[int, int], int] = {}
        for chunk, index in self._program.issue_order():
            step = self._program.steps[index]
            number[chunk, index] = len(number)
            yield StepScript(
                chunk=chunk,
                step=index,
                name=f"{step.action} {step.pattern}",
                after=tuple(number[chunk, earlier] for earlier in step.after),
                teams=tuple(self._teams(step, index, chunk)),
            )

    def _teams(self, step: Step, index: int, chunk: int) -> Iterator[TeamScript]:
        mine = [
            (number, team) for number, team in enumerate(step.teams) if self._seat in team.members
        ]
        if step.pattern is Pattern.NATIVE and self._native:
            for number, team in mine:
                yield TeamScript(number, native=self._call(step, team, chunk))
            return
        numbers = [number for number, _ in mine] if step.teams else [0]
        for number, rounds_of_team in zip(numbers, self._rounds[index], strict=True):
            rounds = (self._round(at, one, chunk) for at, one in enumerate(rounds_of_team))
            yield TeamScript(number, tuple(one for one in rounds if one.sends or one.receives))

    def _round(self, number: int, one: LocalRound, chunk: int) -> RoundScript:
        sends = self._moves(one.sends, chunk, outward=True)
        receives = self._moves(one.receives, chunk, outward=False)
        return RoundScript(number, sends, _ordered(sends, receives))

    def _moves(
        self, transfers: tuple[Transfer, ...], chunk: int, *, outward: bool
    ) -> tuple[Move, ...]:
        group, moves = self._program.group, []
        seen: dict[int, int] = {}
        for transfer in transfers:
            peer = transfer.target if outward else transfer.source
            index = seen[peer] = seen.get(peer, -1) + 1
            ranges = self.places.ranges(in_chunk(transfer.part, chunk, self._program.chunks))
            elements = sum(stop - start for _, start, stop in ranges)
            if elements:
                moves.append(
                    Move(
                        peer=group.ranks[peer],
                        index=index,
                        ranges=ranges,
                        elements=elements,
                        reduce=transfer.reduce,
                        crosses=group.edge(self._seat, peer) is not Edge.ISLAND,
                    )
                )
        return tuple(moves)

    def _call(self, step: Step, team: Team, chunk: int) -> NativeCall:
        members, rule = team.members, team.parts
        ranks = tuple(self._program.group.ranks[seat] for seat in members)
        me = members.index(self._seat)

        def ranges(part: Part) -> tuple[Range, ...]:
            return self.places.ranges(in_chunk(part, chunk, self._program.chunks))

        if step.action is Action.ALL_TO_ALL:
            size = self._program.group.size
            block = rule.block  # type: ignore[union-attr]
            return NativeCall(
                step.action,
                ranks,
                tuple(ranges(block(members, me, j, size)) for j in range(len(members))),
                arriving=tuple(ranges(block(members, j, me, size)) for j in range(len(members))),
            )
        each = [rule.part(members, j) for j in range(len(members))]  # type: ignore[union-attr]
        chunks = self._program.chunks
        lengths = tuple(self._layout.size(in_chunk(part, chunk, chunks)) for part in each)
        only_mine = step.action in (Action.GATHER, Action.SCATTER) and me != 0
        parts = tuple(() if only_mine and j != me else ranges(p) for j, p in enumerate(each))
        return NativeCall(step.action, ranks, parts, lengths)


def _ordered(sends: tuple[Move, ...], receives: tuple[Move, ...]) -> tuple[Move, ...]:
    """Mark the receives that touch what is being sent, or what another receive touches."""
    sent = [r for move in sends for r in move.ranges]
    marked = []
    for number, move in enumerate(receives):
        others = [r for k, other in enumerate(receives) if k != number for r in other.ranges]
        clash = move.reduce and _overlap(move.ranges, sent + others)
        marked.append(
            move
            if not clash
            else Move(
                move.peer, move.index, move.ranges, move.elements, move.reduce, move.crosses, True
            )
        )
    return tuple(marked)


def _overlap(ranges: Sequence[Range], others: Sequence[Range]) -> bool:
    return any(a[0] == b[0] and a[1] < b[2] and b[1] < a[2] for a in ranges for b in others)
