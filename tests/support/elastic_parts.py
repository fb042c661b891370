"""The parts of a small job's state (`elastic_world`) by numbers, and states as a few such numbers.

Every part has a number, by which its value is found; states whose parts have the same numbers are
the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.support.elastic_numbers import Numbers, Renaming
from tests.support.elastic_world import Link, World

State = tuple[int, ...]  # controller, question, what is left to happen; then four for each host
MEMBERS, ASKED, LEFT, FIRST, EACH = 0, 1, 2, 3, 4
AGENT, PROCESS, UP, DOWN = range(EACH)
NOTHING = Link()
_MOST = 12  # numbers of a kind in one state
_ALL = (1 << _MOST) - 1
_SET = [tuple(n for n in range(_MOST) if bits >> n & 1) for bits in range(1 << _MOST)]


class Parts:
    """Parts of states of a job of some hosts, each value with a number."""

    def __init__(self, hosts: int) -> None:
        self.hosts = range(hosts)
        self.first = [FIRST + EACH * host for host in self.hosts]
        self._ids: dict[Any, int] = {}
        self.values: list[Any] = []
        self._bits: list[int] = []  # which numbers that only rise a value has
        self._named: dict[Any, int] = {}
        self._zeros = sum(1 << kind * _MOST for kind in range(3 + hosts))
        self.nobody = self.id(None)  # which is 0, so that no message is
        self.nothing = self.id(NOTHING)

    # --- a state and its parts -------------------------------------------------------------------

    def of(self, state: World) -> State:
        """Return a state as numbers."""
        left = state.faults, state.newcomers, state.late, state.wishes
        parts = [state.members, state.asked, left]
        for host in self.hosts:
            parts += (state.agents[host], state.processes[host], state.up[host], state.down[host])
        return tuple(map(self.id, parts))

    def world(self, state: Sequence[int]) -> World:
        """Return a state as it was."""
        values = self.values
        agents, processes, up, down = (
            tuple(values[state[first + part]] for first in self.first) for part in range(EACH)
        )
        faults, newcomers, late, wishes = values[state[LEFT]]
        return World(
            members=values[state[MEMBERS]], agents=agents, processes=processes, up=up, down=down,
            asked=values[state[ASKED]], faults=faults, newcomers=newcomers, late=late,
            wishes=wishes,
        )  # fmt: skip

    @property
    def size(self) -> int:
        """How many parts of states are known."""
        return len(self.values)

    def id(self, value: Any) -> int:
        """Return the number of a value."""
        found = self._ids.get(value)
        if found is None:
            found = self._ids[value] = len(self.values)
            self.values.append(value)
            self._bits.append(self._count(value))
        return found

    # --- numbers that only rise ------------------------------------------------------------------

    def renumbered(self, state: list[int]) -> State:
        """Return the state with small numbers: it goes on the same way."""
        bits, every = self._bits, self._zeros
        for part in state:
            every |= bits[part]
        if not every & (every + self._zeros):  # no gaps: one more is a single bit, of each kind
            return tuple(state)
        kinds = range(3 + len(self.hosts))
        sets = [every >> kind * _MOST & _ALL for kind in kinds]
        common = every & (1 << 3 * _MOST) - 1
        renaming: Renaming | None = None
        named, known = list(state), self._named
        for at, part in enumerate(state):
            if at == LEFT or not part or part == self.nothing:
                continue
            key = part, every if at < FIRST else common, sets[3 + (at - FIRST) // EACH]
            found = known.get(key)
            if found is None:
                if renaming is None:
                    generations, orders, requests, *statuses = (_SET[own] for own in sets)
                    renaming = Renaming(generations, orders, requests, tuple(statuses))
                found = known[key] = self.id(renaming.of(self.values[part]))
            named[at] = found
        return tuple(named)

    def _count(self, value: Any) -> int:
        """Return the numbers in a part, a bit for each."""
        found = Numbers().find(value)
        kinds = [found.generations, found.orders, found.requests]
        kinds += [found.statuses.get(host, {0}) for host in self.hosts]
        assert max(map(max, kinds)) < _MOST - 1
        bits = sum(1 << kind * _MOST + n for kind, own in enumerate(kinds) for n in own)
        return bits | found.stale << len(kinds) * _MOST  # which leaves a gap for sure
