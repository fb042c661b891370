"""Which wire is slow: what messages take per byte, on every edge, against their own past. Pure.

An edge is a pair of wires, from the one that sends to the one that receives. All that is seen of a
slow wire are slow edges: it is the wire itself where all edges that meet there are slow, and the
link between two where each of them has quick edges, too, or where nothing tells which of both it
is. An edge that is busy for a small part of the step says nothing: no plan would change for it.
What slows all edges of a job alike, where no wire has a part in all of them, is no wire's: two of
three hosts that slow alike cannot be told from any other two, nor from a network that is busy. And
a wire all of whose ways lead to wires that are slow for sure is not blamed for it.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tutti.diagnose.slow import FIRST, ON_END, PAST, SLOW, WELL

LEAST_SHARE = 0.05  # of a step, that an edge must be busy to be looked at
LEAST_BYTES = 32768  # of a step; less is all latency
Edge = tuple[str, str]
Ends = tuple[str, ...]  # one: a wire; two: the link between them


class Traffic(NamedTuple):
    """What an edge carried in a step, and how long it was busy with it."""

    bytes: float
    busy_s: float

    @property
    def pace(self) -> float:
        """Seconds per byte."""
        return self.busy_s / max(self.bytes, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class WireVerdict:
    """A wire, or a link, that became slow, or well again."""

    ends: Ends
    step: int
    factor: float  # times as long for each byte as before; 1: well again
    why: str

    @property
    def slow(self) -> bool:
        """Whether it is slow from now on."""
        return self.factor > 1.0


@dataclass(slots=True)
class _History:
    past: list[float] = field(default_factory=list)  # its first paces
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=ON_END))  # over the past
    shares: deque[float] = field(default_factory=lambda: deque(maxlen=ON_END))  # of the step

    @property
    def is_told(self) -> bool:
        """Whether it is busy enough, and was looked at for long enough, to say anything."""
        return len(self.recent) == ON_END and statistics.median(self.shares) >= LEAST_SHARE

    @property
    def is_slow(self) -> bool:
        return self.is_told and min(self.recent) > SLOW

    @property
    def may_become_slow(self) -> bool:
        return self.is_told and not self.is_slow and self.recent[-1] > SLOW


class SlowWires:
    """Watches the wires of one generation, step by step."""

    def __init__(self) -> None:
        self._edges: dict[Edge, _History] = {}
        self._slow: dict[Ends, frozenset[Edge]] = {}
        self._steps = 0

    def step(
        self, number: int, step_s: float, traffic: Mapping[Edge, Traffic]
    ) -> list[WireVerdict]:
        """Take what every edge carried in a step; return what changed."""
        self._steps += 1
        if self._steps <= FIRST:
            return []
        for edge, own in traffic.items():
            if own.bytes < LEAST_BYTES or own.busy_s <= 0:
                continue
            known = self._edges.setdefault(edge, _History())
            if len(known.past) < PAST:
                known.past.append(own.pace)
                continue
            known.recent.append(own.pace / statistics.median(known.past))
            known.shares.append(own.busy_s / max(step_s, 1e-9))
        return [*self._well_again(number), *self._become_slow(number)]

    def _well_again(self, number: int) -> list[WireVerdict]:
        well = [ends for ends, edges in self._slow.items() if all(map(self._is_well, edges))]
        for ends in well:
            del self._slow[ends]
        why = "carries as much as before again"
        return [WireVerdict(ends=ends, step=number, factor=1.0, why=why) for ends in well]

    def _is_well(self, edge: Edge) -> bool:
        return statistics.median(self._edges[edge].recent) < WELL

    def _become_slow(self, number: int) -> list[WireVerdict]:
        known = frozenset[Edge]().union(*self._slow.values())
        told = {edge: own for edge, own in self._edges.items() if own.is_told and edge not in known}
        slow = {edge for edge, own in told.items() if own.is_slow}
        near = {wire for edge in slow for wire in edge}
        if any(own.may_become_slow and near & set(edge) for edge, own in told.items()):
            return []  # of the same cause, perhaps: a step more tells
        made = []
        for ends in explain(slow, set(told)):
            own = frozenset(edge for edge in slow if set(ends) <= set(edge))
            factor = statistics.median(statistics.median(self._edges[edge].recent) for edge in own)
            self._slow[ends] = own
            why = f"takes {factor:.2f} times as long for each byte as before for {ON_END} steps"
            if others := len(told) - len(slow):
                why += f"; {others} other ways do not" if others > 1 else "; another way does not"
            made.append(WireVerdict(ends=ends, step=number, factor=factor, why=why))
        return made


def explain(slow: set[Edge], edges: set[Edge]) -> list[Ends]:
    """Return the wires and links that make just these of some edges slow."""
    peers: dict[str, set[str]] = defaultdict(set)
    quick: set[str] = set()  # wires that are quick with somebody
    for edge in edges:
        peers[edge[0]].add(edge[1])
        peers[edge[1]].add(edge[0])
        quick |= set() if edge in slow else set(edge)
    wires = [
        wire for wire in sorted(peers)
        # of two that only meet each other nothing tells which it is
        if wire not in quick and (len(peers[wire]) > 1 or peers[wire] <= quick)
    ]  # fmt: skip
    if not slow or (slow == edges and len(wires) > 1):
        return []
    # one that only meets others which may be slow is perhaps none: they would make it seem so
    needed = [wire for wire in wires if peers[wire] - set(wires)]
    left = {tuple(sorted(edge)) for edge in slow if not set(edge) & set(needed)}
    return [*((wire,) for wire in needed), *sorted(left)]
