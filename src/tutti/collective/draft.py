"""Draft: what is asked of an algorithm, and the list of steps while it is being written."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from tutti.collective.group import Group
from tutti.collective.parts import Blocks, Cut, Owned, Parts
from tutti.collective.program import Action, Operation, Pattern, Step, Team
from tutti.collective.schedules import SCHEDULES
from tutti.collective.slices import Part, Slice, section
from tutti.errors import InputError

WHOLE: Part = (section(0),)  # of the operations that have one section


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What an algorithm is asked to do; seats throughout."""

    operation: Operation
    group: Group
    root: int | None = None
    order: tuple[int, ...] | None = None  # of flat algorithms; none: as the group lists its seats
    across: Pattern | None = None  # between islands; none: the algorithm's own choice
    messages: tuple[tuple[int, int], ...] = ()

    @property
    def action(self) -> Action:
        """Return the step action of the same name; a barrier is an all-reduce of a token."""
        if self.operation is Operation.BARRIER:
            return Action.ALL_REDUCE
        return Action(self.operation.value)

    @property
    def all_sections(self) -> Part:
        """Return all sections of an operation with one per seat."""
        return (Slice(range(self.group.size)),)

    @property
    def parts(self) -> Parts:
        """Return how the operation itself divides its data among the whole group."""
        match self.operation:
            case Operation.ALL_TO_ALL:
                return Blocks()
            case (
                Operation.REDUCE_SCATTER
                | Operation.ALL_GATHER
                | Operation.GATHER
                | Operation.SCATTER
            ):
                return Owned()
            case _:
                return Cut(WHOLE)

    @property
    def islands(self) -> list[int]:
        """Return the islands' indices, the root's first and the others in ring order after it."""
        first = 0 if self.root is None else self.group.island_of(self.root)
        number = len(self.group.islands)
        return [(first + k) % number for k in range(number)]

    def root_first(self) -> tuple[int, ...]:
        """Return all seats in ring order, the root first."""
        if self.order is not None:
            at = 0 if self.root is None else self.order.index(self.root)
            return self.order[at:] + self.order[:at]
        return tuple(seat for island in self.islands for seat in self.island_root_first(island))

    def island_root_first(self, island: int) -> tuple[int, ...]:
        """Return the seats of an island, in ring order from the root if it is there."""
        seats = tuple(self.group.seats(island))
        at = seats.index(self.root) if self.root in seats else 0
        return seats[at:] + seats[:at]

    def between(self, action: Action, default: Pattern) -> Pattern:
        """Return the pattern between islands: what was asked for, or the default."""
        if self.across is None:
            return default
        known = [p for p in Pattern if (action, p) in SCHEDULES and p is not Pattern.NATIVE]
        if self.across not in known:
            names = ", ".join(known)
            raise InputError(f"'across' is '{self.across}'; a {action} between islands has {names}")
        return self.across


class Draft:
    """Collects steps; what would do nothing is left out."""

    def __init__(self) -> None:
        self._steps: list[Step] = []

    def add(
        self, action: Action, pattern: Pattern, teams: Iterable[Team], after: tuple[int, ...] = ()
    ) -> tuple[int, ...]:
        """Append a step and return what the next one has to wait for."""
        working = tuple(team for team in teams if len(team.members) > 1)
        if not working:
            return after
        self._steps.append(Step(action=action, pattern=pattern, teams=working, after=after))
        return (len(self._steps) - 1,)

    @property
    def steps(self) -> tuple[Step, ...]:
        """Return the steps so far."""
        return tuple(self._steps)
