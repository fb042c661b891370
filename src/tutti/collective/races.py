"""Races: data that one rank reads and writes, or writes twice, with nothing that says which first.

Teams of one step, and steps that do not wait for each other, may run at the same time. Within a
round a rank may add to what it is sending (receives land in a staging buffer first), but must not
overwrite it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from tutti.collective.expand import team_rounds
from tutti.collective.program import Action, CollectiveProgram, Round
from tutti.collective.symbols import Atoms


class _Use(NamedTuple):
    step: int
    team: int
    writes: bool


def find_race(program: CollectiveProgram, atoms: Atoms) -> str | None:
    """Return a sentence about the first race, or nothing."""
    uses: dict[tuple[int, int], set[_Use]] = defaultdict(set)
    for step, team, at, one in _all_rounds(program):
        clash = _record(uses, step, team, one, atoms)
        if clash is not None:
            rank = program.group.ranks[clash[0]]
            name = atoms.name(clash[1])
            return f"step {step}, round {at}: rank {rank} has {name} overwritten while in use"
    ancestors = _ancestors(program)
    for (seat, atom), seat_uses in uses.items():
        pair = _conflict(seat_uses, ancestors)
        if pair is not None:
            rank, name = program.group.ranks[seat], atoms.name(atom)
            if pair[0].step == pair[1].step:
                return f"step {pair[0].step}: two teams use {name} of rank {rank} at once"
            first, second = sorted(use.step for use in pair)
            return f"step {second} does not wait for step {first}, which uses {name} of rank {rank}"
    return None


def _all_rounds(program: CollectiveProgram) -> list[tuple[int, int, int, Round]]:
    rounds_of_steps = []
    size = program.group.size
    for index, step in enumerate(program.steps):
        if step.action is Action.EXCHANGE:
            rounds_of_steps += [(index, 0, at, one) for at, one in enumerate(step.rounds)]
            continue
        for number, team in enumerate(step.teams):
            rounds = enumerate(team_rounds(step, team, size))
            rounds_of_steps += [(index, number, at, one) for at, one in rounds]
    return rounds_of_steps


def _record(
    uses: dict[tuple[int, int], set[_Use]], step: int, team: int, one: Round, atoms: Atoms
) -> tuple[int, int] | None:
    """Note what a round reads and writes; return the (seat, atom) of a clash inside it."""
    read: set[tuple[int, int]] = set()
    copied: set[tuple[int, int]] = set()
    added: set[tuple[int, int]] = set()
    clashes: set[tuple[int, int]] = set()
    for transfer in one:
        for atom in (atom for piece in transfer.part for atom in atoms.of(piece)):
            read.add((transfer.source, atom))
            key = (transfer.target, atom)
            if key in copied or (key in added and not transfer.reduce):
                clashes.add(key)
            (added if transfer.reduce else copied).add(key)
    for key in read:
        uses[key].add(_Use(step, team, False))
    for key in added | copied:
        uses[key].add(_Use(step, team, True))
    return min(clashes | (read & copied), default=None)


def _ancestors(program: CollectiveProgram) -> list[set[int]]:
    """Return, for each step, all steps that it waits for, directly or not."""
    ancestors: list[set[int]] = []
    for step in program.steps:
        ancestors.append(set(step.after).union(*(ancestors[earlier] for earlier in step.after)))
    return ancestors


def _conflict(seat_uses: set[_Use], ancestors: list[set[int]]) -> tuple[_Use, _Use] | None:
    writes = [use for use in seat_uses if use.writes]
    for one in sorted(writes):
        for other in sorted(seat_uses):
            together = (one.step, one.team) == (other.step, other.team)
            ordered = one.step in ancestors[other.step] or other.step in ancestors[one.step]
            if not together and not ordered:
                return one, other
    return None
