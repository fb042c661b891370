"""Kinds of traffic of a plan's step: who sends how much to whom, and when it is under way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from tutti.collective import CollectiveProgram, Layout, Operation
from tutti.collective.phases import phases
from tutti.cost.network.program_choice import Efficiency
from tutti.cost.plan.class_prices import ClassPricer
from tutti.cost.plan.equal_instructions import Kinds
from tutti.fabric.wiring import Floats, Integers
from tutti.simulate.result import SimulationResult

Axis = Literal["tensor", "context", "experts"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Flight:
    """Transfers that are under way together: chips by number, bytes, the team of each."""

    sources: Integers
    targets: Integers
    num_bytes: Floats
    teams: Integers
    rounds: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inside:
    """Of a collective inside blocks: whose seconds it is part of, and how often it runs there."""

    axis: Axis
    calls: Integers  # in each of the traffic's first instructions
    priced_s: float  # of one call
    pricer: ClassPricer
    kinds: Kinds


@dataclass(slots=True, kw_only=True, eq=False)
class Traffic:
    """What one kind of instruction sends each time it runs, or one collective inside it."""

    name: str
    program: str
    operation: Operation
    ranks: int  # of one group
    groups: int
    num_bytes: float
    chunks: int
    flights: list[Flight]
    efficiency: Efficiency
    seats: Integers | None = None  # of collectives: a row of chips for each group
    instructions: dict[int, Integers] = field(default_factory=dict)  # class → flat indices
    inside: Inside | None = None

    @property
    def first(self) -> Integers:
        """The instructions of the class that stands for the others in time."""
        return self.instructions[min(self.instructions)]

    @property
    def runs(self) -> int:
        """How often a step sends it."""
        return len(self.first) if self.inside is None else int(self.inside.calls.sum())

    def windows(self, result: SimulationResult, seconds: float) -> tuple[Floats, Floats]:
        """Return when each run is under way in a simulated step; `seconds` are those of one run.

        Instructions that send last as long as sending does. The calls inside a pass of blocks are
        spread evenly over it, each at the end of its part: behind the products it waits for.
        """
        start, end = result.start[self.first], result.end[self.first]
        if self.inside is None:
            return start, end
        calls = self.inside.calls
        part = np.repeat((end - start) / calls, calls)
        before = np.repeat(np.cumsum(calls) - calls, calls)
        until = np.repeat(start, calls) + part * (np.arange(len(part)) - before + 1)
        return until - np.minimum(part, seconds), until


def program_flights(program: CollectiveProgram, seats: Integers, num_bytes: float) -> list[Flight]:
    """Return what groups send that run a program at once; a row of `seats` is a group's chips."""
    layout = Layout.of(program, 5040 * program.group.size)
    scale, many = num_bytes / layout.total, len(seats)
    flights = []
    for index in range(len(program.steps)):
        for phase in phases(program, index, layout):
            if not len(phase.sources):
                continue
            per_group = int(phase.teams.max()) + 1
            flights.append(Flight(
                sources=seats[:, phase.sources].ravel(), targets=seats[:, phase.targets].ravel(),
                num_bytes=np.tile(phase.elements * scale, many),
                teams=(np.arange(many)[:, None] * per_group + phase.teams[None, :]).ravel(),
                rounds=phase.rounds,
            ))  # fmt: skip
    return flights
