"""`check`: proves a program right without data, for every size at once, or says what is wrong.

The program is run on symbols. Each atom (a slice that no other slice of the program cuts) on each
seat holds an expression: whose data were added up, in which order. From that follows that nobody
sends what it does not hold, that nothing is added twice, that every result is complete, and that it
is the same expression, hence the same bits, on all ranks. Waiting is sound because every rank
issues steps in one order, a step waits for earlier ones only, and a round posts all its transfers
before it waits; `races` finds steps that should wait for each other and do not.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator

from tutti.collective.expand import rounds
from tutti.collective.layout import held_after, held_before, num_sections
from tutti.collective.parts import Blocks, Reshard
from tutti.collective.program import (
    Action,
    CollectiveProgram,
    Operation,
    Pattern,
    Round,
    Step,
    Team,
    Transfer,
)
from tutti.collective.races import find_race
from tutti.collective.schedules import SCHEDULES
from tutti.collective.slices import Part
from tutti.collective.symbols import Atoms, Expressions
from tutti.errors import InputError


class Reason(enum.StrEnum):
    """Why a program is refused."""

    ENDS = "ends"  # a transfer or a team without proper members
    PARTS = "parts"  # a rule that does not fit its team or action
    PATTERN = "pattern"  # an action that has no such pattern
    NATIVE = "native"  # a native step that leaves its island
    BOUNDS = "bounds"  # a slice outside the data
    WAIT = "wait"  # a step that waits for itself or for a later one
    RACE = "race"  # steps that touch the same data and do not wait for each other
    MISSING = "missing"  # data sent or added to where there are none
    TWICE = "twice"  # a contribution added twice
    RESULT = "result"  # a result that is absent, incomplete or not the same everywhere


class ProgramError(InputError):
    """A program that is not right."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


Fail = Callable[[Reason, str], ProgramError]


def check(program: CollectiveProgram) -> None:
    """Raise a `ProgramError` unless the program is right for every size of its data."""
    for index, step in enumerate(program.steps):
        _check_structure(program, index, step)
    expanded = [list(rounds(program, step)) for step in program.steps]
    for index, step_rounds in enumerate(expanded):
        for at, transfer in _numbered(step_rounds):
            _check_transfer(program, index, at, transfer)
    atoms = Atoms(
        num_sections(program),
        (piece for moves in expanded for one in moves for t in one for piece in t.part),
    )
    race = find_race(program, atoms)
    if race is not None:
        raise ProgramError(Reason.RACE, f"{program}: {race}")
    _Run(program, atoms).execute(expanded)


def _numbered(step_rounds: list[Round]) -> Iterator[tuple[int, Transfer]]:
    for at, one in enumerate(step_rounds):
        for transfer in one:
            yield at, transfer


# --- shape ------------------------------------------------------------------------------------


def _check_structure(program: CollectiveProgram, index: int, step: Step) -> None:
    def fail(reason: Reason, message: str) -> ProgramError:
        return ProgramError(reason, f"{program}: step {index} ({step.action}): {message}")

    for earlier in step.after:
        if not 0 <= earlier < index:
            raise fail(Reason.WAIT, f"waits for step {earlier}, which does not come before it")
    if step.action is Action.EXCHANGE:
        if step.teams:
            raise fail(Reason.PARTS, "an exchange lists rounds, not teams")
        return
    if (step.action, step.pattern) not in SCHEDULES:
        raise fail(Reason.PATTERN, f"there is no pattern '{step.pattern}' for it")
    if step.rounds:
        raise fail(Reason.PARTS, "only an exchange lists its rounds")
    for team in step.teams:
        _check_team(program, step, team, fail)


def _check_team(program: CollectiveProgram, step: Step, team: Team, fail: Fail) -> None:
    group, members = program.group, team.members
    if not members or len(set(members)) != len(members):
        raise fail(Reason.ENDS, f"a team of {list(members)} is empty or has a member twice")
    outside = [seat for seat in members if not 0 <= seat < group.size]
    if outside:
        raise fail(Reason.ENDS, f"seat {outside[0]} is outside the group of {group.size}")
    if isinstance(team.parts, (Blocks, Reshard)) != (step.action is Action.ALL_TO_ALL):
        raise fail(Reason.PARTS, f"cannot divide its data by {type(team.parts).__name__.lower()}")
    if team.parts.num_parts(members) != len(members):
        number = team.parts.num_parts(members)
        raise fail(Reason.PARTS, f"{number} parts for a team of {len(members)}")
    islands = {group.island_of(seat) for seat in members}
    if step.pattern is Pattern.NATIVE and len(islands) > 1:
        raise fail(Reason.NATIVE, f"a native team spans {len(islands)} islands")


def _check_transfer(program: CollectiveProgram, index: int, at: int, transfer: Transfer) -> None:
    where = f"{program}: step {index}, round {at}"
    size = program.group.size
    for seat in (transfer.source, transfer.target):
        if not 0 <= seat < size:
            raise ProgramError(Reason.ENDS, f"{where}: seat {seat} is outside the group of {size}")
    if transfer.source == transfer.target:
        raise ProgramError(Reason.ENDS, f"{where}: seat {transfer.source} sends to itself")
    _check_bounds(program, where, transfer.part)


def _check_bounds(program: CollectiveProgram, where: str, part: Part) -> None:
    number = num_sections(program)
    for piece in part:
        low, high = min(piece.sections, default=0), max(piece.sections, default=0)
        if low < 0 or high >= number:
            raise ProgramError(Reason.BOUNDS, f"{where}: slice {piece} of {number} sections")
        if not 0 <= piece.start <= piece.stop <= 1:
            raise ProgramError(Reason.BOUNDS, f"{where}: slice {piece} is not within 0..1")
        if program.operation is Operation.BARRIER and not piece.is_whole:
            raise ProgramError(Reason.BOUNDS, f"{where}: a barrier's token cannot be divided")


# --- meaning ----------------------------------------------------------------------------------


class _Run:
    """The symbolic state of all seats while a program runs."""

    def __init__(self, program: CollectiveProgram, atoms: Atoms) -> None:
        self._program = program
        self._atoms = atoms
        self._expressions = Expressions(program.group.size)
        self._held: list[dict[int, int]] = [
            {atom: seat for section in held_before(program, seat) for atom in atoms.all_of(section)}
            for seat in range(program.group.size)
        ]

    def execute(self, expanded: list[list[Round]]) -> None:
        """Run all rounds, then look at what every seat ends with."""
        whole = self._expected()
        for index, step_rounds in enumerate(expanded):
            for at, one in enumerate(step_rounds):
                self._round(f"{self._program}: step {index}, round {at}", one)
        self._check_result(whole)

    def _expected(self) -> dict[int, int]:
        """Return, for each atom, the set of seats whose data its result is the sum of."""
        contributors: dict[int, int] = {}
        for seat, held in enumerate(self._held):
            for atom in held:
                contributors[atom] = contributors.get(atom, 0) | 1 << seat
        return contributors

    def _round(self, where: str, one: Round) -> None:
        messages = [(transfer, self._read(where, transfer)) for transfer in one]
        for transfer, message in messages:
            held = self._held[transfer.target]
            for atom, value in message:
                held[atom] = self._added(where, transfer, atom, value) if transfer.reduce else value

    def _read(self, where: str, transfer: Transfer) -> list[tuple[int, int]]:
        held = self._held[transfer.source]
        message = []
        for piece in transfer.part:
            for atom in self._atoms.of(piece):
                if atom not in held:
                    sender, target = self._ranks(transfer)
                    text = f"rank {sender} sends {piece} to rank {target} but does not hold it"
                    raise ProgramError(Reason.MISSING, f"{where}: {text}")
                message.append((atom, held[atom]))
        return message

    def _added(self, where: str, transfer: Transfer, atom: int, value: int) -> int:
        source, target = self._ranks(transfer)
        own = self._held[transfer.target].get(atom)
        if own is None:
            text = f"rank {target} has nothing to add {self._atoms.name(atom)} of rank {source} to"
            raise ProgramError(Reason.MISSING, f"{where}: {text}")
        if self._expressions.overlap(own, value):
            text = f"rank {target} adds a contribution to {self._atoms.name(atom)} twice"
            raise ProgramError(Reason.TWICE, f"{where}: {text} (from rank {source})")
        return self._expressions.sum(own, value)

    def _ranks(self, transfer: Transfer) -> tuple[int, int]:
        ranks = self._program.group.ranks
        return ranks[transfer.source], ranks[transfer.target]

    def _check_result(self, whole: dict[int, int]) -> None:
        first: dict[int, int] = {}
        for seat, rank in enumerate(self._program.group.ranks):
            for section in held_after(self._program, seat):
                for atom in self._atoms.all_of(section):
                    self._check_atom(rank, atom, self._held[seat].get(atom), whole[atom], first)

    def _check_atom(
        self, rank: int, atom: int, value: int | None, whole: int, first: dict[int, int]
    ) -> None:
        name = self._atoms.name(atom)
        problem = None
        if value is None:
            problem = f"rank {rank} never gets {name}"
        elif self._expressions.mask(value) != whole:
            lacking = whole & ~self._expressions.mask(value)
            seat = lacking.bit_length() - 1
            problem = f"rank {rank} ends without rank {self._program.group.ranks[seat]}'s {name}"
        elif first.setdefault(atom, value) != value:
            problem = f"rank {rank} adds {name} up in another order than others do"
        if problem is not None:
            raise ProgramError(Reason.RESULT, f"{self._program}: {problem}")
