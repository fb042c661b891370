"""Load: what a step puts on each rank's links, without listing its transfers.

This is what the cost model prices: how many rounds a step takes, and how many elements each seat
sends and receives on each kind of edge. Rings and exchanges of n ranks have n² transfers; here
they are summed in closed form, so that a step on 16,384 ranks costs milliseconds. A test holds it
against the transfers one by one.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate
from typing import TypeVar

from tutti.collective.expand import in_chunk
from tutti.collective.group import Edge, Group
from tutti.collective.layout import Layout
from tutti.collective.parts import Blocks, Owned, PairRule, PartRule, Reshard
from tutti.collective.program import Action, CollectiveProgram, Pattern, Step, Team
from tutti.collective.schedules import SCHEDULES
from tutti.collective.slices import section

K = TypeVar("K", bound=Hashable)

_GATHERED = (Action.ALL_GATHER, Action.ALL_REDUCE)
_SCATTERED = (Action.REDUCE_SCATTER, Action.ALL_REDUCE)


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """Rounds of a step, and elements by kind of edge and seat.

    Where who sends changes from round to round, `by_round` holds the most of a seat in each.
    """

    rounds: int
    sent: dict[Edge, list[int]]
    received: dict[Edge, list[int]]
    by_round: tuple[dict[Edge, int], ...] = ()

    def plus(self, later: Load) -> Load:
        """Return both, one after the other."""
        sent, received = (
            {edge: [a + b for a, b in zip(own[edge], more[edge], strict=True)] for edge in own}
            for own, more in ((self.sent, later.sent), (self.received, later.received))
        )
        return Load(self.rounds + later.rounds, sent, received, self.by_round + later.by_round)

    def uses(self, edge: Edge) -> bool:
        """Tell whether anything goes over a kind of edge."""
        return any(self.sent[edge])

    def busiest(self, seconds: Mapping[Edge, float]) -> float:
        """Return how long a seat is busy at most with kinds of edges that leave by the same wire.

        `seconds` are those of an element on each kind. A round of a tree waits for the one before:
        what others carry meanwhile is time, too.
        """
        steady = max(
            max(map(sum, zip(*([each * s for each in way[edge]] for edge, s in seconds.items()),
                             strict=True)), default=0.0)
            for way in (self.sent, self.received)
        ) if seconds else 0.0  # fmt: skip
        turns = sum(
            max((most * seconds.get(edge, 0.0) for edge, most in one.items()), default=0.0)
            for one in self.by_round
        )
        return max(steady, turns)


def load(program: CollectiveProgram, index: int, layout: Layout, chunk: int = 0) -> Load:
    """Return the load of one step for one chunk."""
    step = program.steps[index]
    count = _Count(program, layout, chunk)
    if step.action is Action.EXCHANGE:
        for transfer in (transfer for one in step.rounds for transfer in one):
            part = in_chunk(transfer.part, chunk, program.chunks)
            count.add(transfer.source, transfer.target, layout.size(part))
        return Load(len(step.rounds), count.sent, count.received)
    for team in step.teams:
        count.team(step, team)
    schedule = SCHEDULES[step.action, step.pattern]
    sizes = {len(team.members) for team in step.teams}
    rounds = max(map(schedule.rounds, sizes), default=0)
    return Load(rounds, count.sent, count.received, count.by_round())


class _Count:
    """The sums while they are being made."""

    def __init__(self, program: CollectiveProgram, layout: Layout, chunk: int) -> None:
        self._group = program.group
        self._layout = layout
        self._chunk = (chunk, program.chunks)
        self._known: dict[tuple[int, int], list[int]] = {}
        self.sent = {edge: [0] * program.group.size for edge in Edge}
        self.received = {edge: [0] * program.group.size for edge in Edge}
        # of steps made of moves: by edge and round, what each seat sends, and what it receives
        self._moved: dict[tuple[Edge, int], tuple[dict[int, int], dict[int, int]]] = {}

    def by_round(self) -> tuple[dict[Edge, int], ...]:
        """Return the most that a seat sends or receives in each round of moves."""
        rounds: dict[int, dict[Edge, int]] = defaultdict(dict)
        for (edge, at), ways in self._moved.items():
            rounds[at][edge] = max(max(way.values()) for way in ways)
        return tuple(rounds.values())

    def add(self, source: int, target: int, elements: int) -> None:
        """Count one message."""
        edge = self._group.edge(source, target)
        self.sent[edge][source] += elements
        self.received[edge][target] += elements

    def team(self, step: Step, team: Team) -> None:
        """Count all that one team of a step moves."""
        if isinstance(team.parts, (Blocks, Reshard)):
            self._pairs(team.members, team.parts)
            return
        sizes = self._sizes(team.parts, team.members)
        if step.action not in (*_GATHERED, *_SCATTERED):
            self._moves(step, team.members, sizes)
        elif step.pattern is Pattern.RING:
            self._ring(step.action, team.members, sizes)
        elif step.pattern in (Pattern.DIRECT, Pattern.NATIVE):
            self._direct(step.action, team.members, sizes)
        else:
            self._moves(step, team.members, sizes)

    def _sizes(self, rule: PartRule, members: tuple[int, ...]) -> list[int]:
        """Return the elements of each member's part; rules that teams share are summed once."""
        key = (id(rule), len(members))
        if isinstance(rule, Owned) or key not in self._known:
            parts = (rule.part(members, i) for i in range(len(members)))
            self._known[key] = [self._layout.size(in_chunk(part, *self._chunk)) for part in parts]
        return self._known[key]

    def _ring(self, action: Action, members: tuple[int, ...], sizes: list[int]) -> None:
        total, size = sum(sizes), len(members)
        for i in range(size):
            following = (i + 1) % size
            if following == i:
                return
            if action in _GATHERED:  # i passes on all but what its neighbour began with
                self.add(members[i], members[following], total - sizes[following])
            if action in _SCATTERED:  # the same backwards
                self.add(members[following], members[i], total - sizes[following])

    def _direct(self, action: Action, members: tuple[int, ...], sizes: list[int]) -> None:
        ones = [1] * len(members)
        if action in _GATHERED:
            self._product(members, sizes, ones)
        if action in _SCATTERED:
            self._product(members, ones, sizes)

    def _product(self, members: Sequence[int], gives: list[int], takes: list[int]) -> None:
        """Count an exchange in which i sends gives[i]·takes[j] to each other j."""
        if not members:
            return
        taken = _edge_sums(self._group, members, takes)
        given = _edge_sums(self._group, members, gives)
        for edge in Edge:
            sent, received = self.sent[edge], self.received[edge]
            for i, seat in enumerate(members):
                sent[seat] += gives[i] * taken[edge][i]
                received[seat] += takes[i] * given[edge][i]

    def _pairs(self, members: tuple[int, ...], rule: PairRule) -> None:
        size, layout = self._group.size, self._layout
        if isinstance(rule, Blocks) and isinstance(layout.counts, int):
            one = layout.size(in_chunk((section(0),), *self._chunk))
            gives = [len(rule.sources_of(members, i)) * one for i in range(len(members))]
            takes = [len(rule.targets_of(members, i)) for i in range(len(members))]
            self._product(members, gives, takes)
            return
        for i, source in enumerate(members):
            for j, target in enumerate(members):
                if i != j:
                    part = in_chunk(rule.block(members, i, j, size), *self._chunk)
                    self.add(source, target, layout.size(part))

    def _moves(self, step: Step, members: tuple[int, ...], sizes: list[int]) -> None:
        schedule, size = SCHEDULES[step.action, step.pattern], len(members)
        reached = [0, *accumulate(sizes * 2)]
        for at in range(schedule.rounds(size)):
            for move in schedule.moves(size, at):
                elements = reached[move.first + move.number] - reached[move.first]
                source, target = members[move.source], members[move.target]
                self.add(source, target, elements)
                edge = self._group.edge(source, target)
                ways = self._moved.setdefault((edge, at), (defaultdict(int), defaultdict(int)))
                ways[0][source] += elements
                ways[1][target] += elements


def _edge_sums(group: Group, members: Sequence[int], values: list[int]) -> dict[Edge, list[int]]:
    """Return, for each member, the sum of the others' values over each kind of edge."""
    islands = [group.island_of(seat) for seat in members]
    total = sum(values)
    if islands.count(islands[0]) == len(islands):
        inside = [total - value for value in values]
        nothing = [0] * len(values)
        return {Edge.ISLAND: inside, Edge.RAIL: nothing, Edge.CROSS: nothing}
    rails = [group.rail_of(seat) for seat in members]
    island_sum = _sums(islands, values)
    rail_sum = _sums(rails, values)
    both_sum = _sums(list(zip(islands, rails, strict=True)), values)
    sums: dict[Edge, list[int]] = {edge: [] for edge in Edge}
    for i, (island, rail) in enumerate(zip(islands, rails, strict=True)):
        on_rail = rail_sum[rail] - both_sum[island, rail]
        sums[Edge.ISLAND].append(island_sum[island] - values[i])
        sums[Edge.RAIL].append(on_rail)
        sums[Edge.CROSS].append(total - island_sum[island] - on_rail)
    return sums


def _sums(keys: Sequence[K], values: list[int]) -> dict[K, int]:
    sums: dict[K, int] = defaultdict(int)
    for key, value in zip(keys, values, strict=True):
        sums[key] += value
    return sums
