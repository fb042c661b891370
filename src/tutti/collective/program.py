"""CollectiveProgram: what every rank does, step by step, as data.

Owns the nouns of the language (operation, step, team, transfer) and their written form. What a step
means is said by `expand`; whether a program is right by `check`; who makes programs is `builder`.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator
from typing import Any

from tutti.collective.group import Group
from tutti.collective.notation import fold, read_numbers, unfold
from tutti.collective.parts import Parts, read_parts, write_parts
from tutti.collective.slices import Part
from tutti.document import Count, Natural, Place, build_fields, plain_fields


class Operation(enum.StrEnum):
    """What a program computes."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    GATHER = "gather"
    SCATTER = "scatter"
    ALL_TO_ALL = "all_to_all"
    SEND_RECEIVE = "send_receive"
    BARRIER = "barrier"

    @property
    def has_root(self) -> bool:
        """Tell whether one rank is the source or the target of everything."""
        return self in _ROOTED

    @property
    def reduces(self) -> bool:
        """Tell whether values are added up."""
        return self in _REDUCING


_ROOTED = frozenset({Operation.BROADCAST, Operation.REDUCE, Operation.GATHER, Operation.SCATTER})
_REDUCING = frozenset(
    {Operation.ALL_REDUCE, Operation.REDUCE_SCATTER, Operation.REDUCE, Operation.BARRIER}
)


class Action(enum.StrEnum):
    """What a step does in each of its teams; the first member of a team is its root."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    GATHER = "gather"
    SCATTER = "scatter"
    ALL_TO_ALL = "all_to_all"
    EXCHANGE = "exchange"  # transfers written out


class Pattern(enum.StrEnum):
    """How a team does it."""

    NATIVE = "native"  # one call of the island's own library; only inside one island
    RING = "ring"  # neighbour to neighbour; for broadcast and reduce: a chain
    TREE = "tree"  # binomial: few rounds
    BINARY = "binary"  # at most two children: pipelines well in chunks
    DOUBLING = "doubling"  # distances 1, 2, 4, …: few rounds and the least volume, any size
    DIRECT = "direct"  # every pair talks


@dataclasses.dataclass(frozen=True, slots=True)
class Team:
    """The members (seats) of one sub-collective, in its order, and what is whose."""

    members: tuple[int, ...]
    parts: Parts


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One message: `part` goes from seat to seat, there to replace or to be added."""

    source: Natural
    target: Natural
    part: Part
    reduce: bool = False


Round = tuple[Transfer, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _WrittenTeam:
    """A team, or several that differ only by a shift of their members."""

    members: object
    times: Count = 1
    shift: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _WrittenStep:
    """What of a step is written as it is held; teams are folded."""

    action: Action
    pattern: Pattern = Pattern.DIRECT
    teams: object = None
    rounds: tuple[Round, ...] = ()
    after: tuple[Natural, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One action of several teams at the same time, after the steps it waits for.

    `after` is local: what a rank does in this step begins when what the same rank does in those
    steps, and in the steps that those wait for, is done. A step of the action `exchange` has
    `rounds` instead of teams.
    """

    action: Action
    pattern: Pattern = Pattern.DIRECT
    teams: tuple[Team, ...] = ()
    rounds: tuple[Round, ...] = ()
    after: tuple[int, ...] = ()

    @classmethod
    def from_document(cls, value: object, place: Place) -> Step:
        """Build a step; folded teams are unfolded."""
        written = build_fields(_WrittenStep, value, place)
        return cls(
            action=written.action,
            pattern=written.pattern,
            teams=_read_teams(written.teams, place.key("teams")),
            rounds=written.rounds,
            after=written.after,
        )

    def to_document(self) -> dict[str, Any]:
        """Return the step with equal teams folded."""
        written = plain_fields(dataclasses.replace(self, teams=()))
        if self.teams:
            folded = fold([(team.members, team.parts) for team in self.teams])
            written["teams"] = [repeat | write_parts(parts) for repeat, parts in folded]
        return written


def _read_teams(value: object, place: Place) -> tuple[Team, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise place.value_error("must be a list of teams")
    teams: list[Team] = []
    for index, item in enumerate(value):
        inner = place.item(index, item)
        if not isinstance(item, dict):
            raise inner.value_error("must be a mapping")
        fields = dict(item)
        parts = read_parts(fields, inner)
        written = build_fields(_WrittenTeam, fields, inner)
        members = read_numbers(written.members, inner.key("members"))
        repeated = unfold(members, written.times, written.shift, inner)
        teams.extend(Team(one, parts) for one in repeated)
    return tuple(teams)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveProgram:
    """An operation on a group as a list of steps; every number in it is a seat of the group.

    With `chunks`, all steps run once for each of so many equal pieces of every section, as a
    pipeline: step i of a chunk waits for the same chunk's steps only. With `connections`, each
    message between islands travels as so many equal stripes.
    """

    operation: Operation
    algorithm: str
    group: Group
    steps: tuple[Step, ...] = ()
    root: Natural | None = None
    messages: tuple[tuple[Natural, Natural], ...] = ()  # of send_receive: (source, target)
    chunks: Count = 1
    connections: Count = 1

    def __post_init__(self) -> None:
        size = self.group.size
        if self.operation.has_root != (self.root is not None):
            needs = "needs a" if self.operation.has_root else "has no"
            raise ValueError(f"'{self.operation}' {needs} root")
        if self.root is not None and self.root >= size:
            raise ValueError(f"'root' is seat {self.root} of a group of {size}")
        if self.messages and self.operation is not Operation.SEND_RECEIVE:
            raise ValueError(f"'{self.operation}' has no messages")
        if any(seat >= size for message in self.messages for seat in message):
            raise ValueError(f"'messages' names a seat outside the group of {size}")

    def issue_order(self) -> Iterator[tuple[int, int]]:
        """Yield (chunk, step) in the order in which every rank issues them: a wavefront."""
        for wave in range(self.chunks + len(self.steps) - 1):
            for chunk in range(max(0, wave - len(self.steps) + 1), min(wave, self.chunks - 1) + 1):
                yield chunk, wave - chunk

    def to_document(self) -> dict[str, Any]:
        """Return the program as plain values."""
        return plain_fields(self)

    def __str__(self) -> str:
        shape = f"{len(self.group.islands)} islands, {self.group.size} ranks"
        return f"{self.operation}/{self.algorithm} ({shape}, {len(self.steps)} steps)"
