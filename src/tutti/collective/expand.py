"""What a step means: rounds of transfers.

The meaning of every step is its expansion. A round is a set of transfers that may run at the same
time: all of them read what was there before the round, then they take effect in the listed order,
which fixes the order of every reduction. A rank enters its next round when its own transfers of the
last one are done. A native step is *defined* by its expansion too, but `comm` calls the library.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import zip_longest

from tutti.collective.parts import Blocks, PartRule, Reshard, whole
from tutti.collective.program import (
    Action,
    CollectiveProgram,
    Pattern,
    Round,
    Step,
    Team,
    Transfer,
)
from tutti.collective.schedules import SCHEDULES, PartsMove
from tutti.collective.slices import Part, Slice, join


@dataclasses.dataclass(frozen=True, slots=True)
class LocalRound:
    """What one seat sends and receives in one round; receives are applied in their order."""

    sends: Round
    receives: Round


def parts_of(rule: PartRule, members: tuple[int, ...], first: int, count: int) -> Part:
    """Return `count` parts from `first` on, modulo the team's size, with neighbours joined."""
    size = len(members)
    if count == size:
        return whole(rule, members)
    return join(
        piece for k in range(first, first + count) for piece in rule.part(members, k % size)
    )


def _transfer(team: Team, move: PartsMove, group_size: int) -> Transfer:
    members, rule = team.members, team.parts
    if isinstance(rule, (Blocks, Reshard)):
        part = rule.block(members, move.source, move.target, group_size)
    else:
        part = parts_of(rule, members, move.first, move.number)
    return Transfer(
        source=members[move.source], target=members[move.target], part=part, reduce=move.reduce
    )


def team_rounds(step: Step, team: Team, group_size: int) -> Iterator[Round]:
    """Yield the rounds of one team."""
    schedule = SCHEDULES[step.action, step.pattern]
    size = len(team.members)
    for at in range(schedule.rounds(size)):
        yield tuple(_transfer(team, move, group_size) for move in schedule.moves(size, at))


def rounds(program: CollectiveProgram, step: Step) -> Iterator[Round]:
    """Yield the rounds of a step; the teams' rounds of one number are one round."""
    if step.action is Action.EXCHANGE:
        yield from step.rounds
        return
    size = program.group.size
    for together in zip_longest(*(team_rounds(step, team, size) for team in step.teams)):
        yield tuple(transfer for one in together if one for transfer in one)


def seat_rounds(program: CollectiveProgram, step: Step, seat: int) -> list[list[LocalRound]]:
    """Return the rounds of each team in which `seat` takes part, as it sees them.

    The teams of a step do not wait for each other: one list each. Costs no more than what the seat
    itself does, however large the group.
    """
    if step.action is Action.EXCHANGE:
        return [[_local(one, seat) for one in step.rounds]]
    size = program.group.size
    return [_team_seat(step, team, seat, size) for team in step.teams if seat in team.members]


def _local(one: Round, seat: int) -> LocalRound:
    return LocalRound(
        tuple(transfer for transfer in one if transfer.source == seat),
        tuple(transfer for transfer in one if transfer.target == seat),
    )


def _team_seat(step: Step, team: Team, seat: int, group_size: int) -> list[LocalRound]:
    schedule = SCHEDULES[step.action, step.pattern]
    size, position = len(team.members), team.members.index(seat)
    local_rounds = []
    for at in range(schedule.rounds(size)):
        sends = schedule.sends(size, at, position)
        receives = schedule.receives(size, at, position)
        local_rounds.append(
            LocalRound(
                tuple(_transfer(team, move, group_size) for move in sends),
                tuple(_transfer(team, move, group_size) for move in receives),
            )
        )
    return local_rounds


def in_chunk(part: Part, chunk: int, chunks: int) -> Part:
    """Return a part as the run of one chunk means it."""
    return tuple(piece.in_chunk(chunk, chunks) for piece in part)


def stripes(part: Part, connections: int) -> list[Part]:
    """Return a message's part as the equal stripes that several connections carry."""
    if connections == 1:
        return [part]
    cuts = Slice(range(1))
    shares = [cuts.in_chunk(k, connections) for k in range(connections)]
    return [tuple(piece.cut(share.start, share.stop) for piece in part) for share in shares]


def written_out(program: CollectiveProgram) -> CollectiveProgram:
    """Return the same program with every step's transfers written out."""
    steps = tuple(
        Step(
            action=Action.EXCHANGE,
            pattern=Pattern.DIRECT,
            rounds=tuple(rounds(program, step)),
            after=step.after,
        )
        for step in program.steps
    )
    return dataclasses.replace(program, steps=steps)
