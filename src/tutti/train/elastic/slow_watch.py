"""What the steps of a generation took is watched: chips and wires that became slow, or well again.

What was slow when a generation began is well when it becomes quicker than it was; what becomes
slower in it is that many times slower than it already was.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

from tutti.diagnose.slow import Recovery, SlowRanks, Verdict
from tutti.diagnose.slow_parts import Wire, traffic_of
from tutti.diagnose.slow_wires import Edge, Ends, SlowWires, Traffic, WireVerdict
from tutti.elastic.membership import Membership
from tutti.hardware.wires import wire_of
from tutti.plan.plan import Plan
from tutti.ranks.rank_places import Seats, compute_seconds
from tutti.train.elastic.better_plan import position_of
from tutti.train.run.planning import Job

_AGAIN = "is as quick as it should be again"
Part = TypeVar("Part", bound=Hashable)


class _Known(Generic[Part]):
    """What was slow when a generation began."""

    def __init__(self, factors: Mapping[Part, float]) -> None:
        self._factors = dict(factors)
        self._recovering = {part: Recovery(factor) for part, factor in factors.items()}

    def factor(self, part: Part, told: float) -> float:
        """Return how slow something is of which its generation tells a factor."""
        return told * self._factors.get(part, 1.0)

    def recovered(self, now: Mapping[Part, float]) -> list[Part]:
        """Return what is well from now on, given what each took."""
        well = [p for p, own in self._recovering.items() if p in now and own.step(now[p])]
        for part in well:
            del self._recovering[part], self._factors[part]
        return well


class SlowWatch:
    """Compares what the ranks of a generation compute with the plan, their past and each other."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._generation, self._ranks = 0, SlowRanks(())
        self._known = _Known[int]({})

    def step(
        self,
        members: Membership,
        plan: Plan,
        slow: Mapping[str, float],
        number: int,
        compute_s: Sequence[float],
    ) -> list[Verdict]:
        """Take a step of a generation; return what changed. `slow` are the chips known to be."""
        if self._generation != members.generation:
            self._generation = members.generation
            self._ranks = SlowRanks(self._expected(plan))
            self._known = _Known(
                {seat.rank: slow[seat.chip] for seat in members.seats if seat.chip in slow}
            )
        verdicts = [
            replace(verdict, factor=self._known.factor(verdict.rank, verdict.factor))
            for verdict in self._ranks.step(number, compute_s)
        ]
        well = self._known.recovered(dict(enumerate(compute_s)))
        return verdicts + [Verdict(rank=r, step=number, factor=1.0, why=_AGAIN) for r in well]

    def _expected(self, plan: Plan) -> list[float]:
        """Return the seconds that each rank of a plan should compute in a step."""
        predicted = replace(self._job, plan=plan).predicted()
        return compute_seconds(Seats(plan, self._job.spec), predicted)


class WireWatch:
    """Compares what the wires of a generation take for each byte with their past and each other."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._generation, self._wires = 0, SlowWires()
        self._names: list[str] = []
        self._known = _Known[Ends]({})

    def step(
        self,
        members: Membership,
        slow: Mapping[Ends, float],
        number: int,
        step_s: float,
        wires: Iterable[Wire],
    ) -> list[WireVerdict]:
        """Take a step of a generation; return what changed. `slow` are the wires known to be."""
        if self._generation != members.generation:
            self._generation = members.generation
            self._wires, self._known = SlowWires(), _Known(slow)
            chips = [position_of(seat.chip) for seat in members.seats]
            self._names = [wire_of(self._job.cluster, chip) for chip in chips]
        traffic = traffic_of(self._names, wires)
        verdicts = [
            replace(verdict, factor=self._known.factor(verdict.ends, verdict.factor))
            for verdict in self._wires.step(number, step_s, traffic)
        ]
        well = self._known.recovered(_paces(traffic, slow))
        return verdicts + [WireVerdict(ends=e, step=number, factor=1.0, why=_AGAIN) for e in well]


def _paces(traffic: Mapping[Edge, Traffic], slow: Iterable[Ends]) -> dict[Ends, float]:
    """Return what a byte takes over each wire or link, over all edges that it has a part in."""
    paces = {}
    for ends in slow:
        own = [told for edge, told in traffic.items() if set(ends) <= set(edge)]
        if own:
            whole = Traffic(sum(o.bytes for o in own), sum(o.busy_s for o in own))
            paces[ends] = whole.pace
    return paces
