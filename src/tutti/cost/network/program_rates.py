"""The price of a program where every rank's NIC rate is known: what each wire carries, and when.

A wire is a NIC (of one island and rail, either direction), a rank's share of its island's links,
or a rail's way through the spine. A chunk takes as long as its rounds, in small groups with every
rank at its own pace (`fabric.rounds`), in large ones one after the other at the pace of the busiest
wire. Chunks overlap: together they cannot take less than what the busiest wire carries in all. An
all-reduce counts as its halves, which load different directions.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Iterator

from tutti.collective import CollectiveProgram, Pattern, Transfer
from tutti.collective.expand import rounds
from tutti.collective.group import Edge, Group
from tutti.collective.layout import Layout
from tutti.collective.program import Action, Operation, Step
from tutti.cost.network.group_links import GroupLinks
from tutti.fabric.rounds import Flow, makespan

Wire = tuple[str, int, int]  # what, island or seat, rail
_HALVES = {
    Pattern.TREE: (Action.REDUCE, Action.BROADCAST),
    Pattern.BINARY: (Action.REDUCE, Action.BROADCAST),
}
_HANDLING = 0.15  # of a round's latency: the processors' work, which no overlap hides
_WHOLE = 5040  # elements of a section: divides well
_FEW = 16  # ranks, up to which ranks are followed one by one


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RatedPrice:
    """What a program costs per byte of all sections, and to start."""

    passage_s: float  # per byte: all rounds one after the other
    busiest_s: float  # per byte: what the busiest wire carries in all
    startup_s: float  # of one chunk: the latencies of its rounds
    rank_startup_s: float  # of those, the ones of the rank that takes part in most rounds
    rank_step_startup_s: float  # and of its longest step: what every further chunk adds at least

    def seconds(self, num_bytes: float, chunks: int) -> float:
        """Return the time for so many bytes in so many chunks."""
        first = self.passage_s * num_bytes / chunks + self.startup_s
        pace = max(self.busiest_s * num_bytes / chunks, self.rank_step_startup_s)
        return first + (chunks - 1) * (pace + _HANDLING * self.rank_startup_s)


@functools.lru_cache(maxsize=4096)
def rated_price(program: CollectiveProgram, links: GroupLinks) -> RatedPrice:
    """Return the price of a program on a group with known NIC rates; its chunks do not matter."""
    program = halved(dataclasses.replace(program, chunks=1))
    layout = Layout.of(program, _WHOLE)
    whole = float(layout.total)
    capacities = _Capacities(links)
    carried: dict[Wire, float] = defaultdict(float)
    passage = startup = longest = 0.0
    mine: dict[int, float] = defaultdict(float)  # seat → latencies of its rounds
    walk: list[list[Flow]] = []
    for step in program.steps:
        step_mine: dict[int, float] = defaultdict(float)
        for one in rounds(program, step):
            busy: dict[Wire, float] = defaultdict(float)
            flows: list[Flow] = []
            latency = 0.0
            for transfer in one:
                elements = layout.size(transfer.part)
                if not elements:
                    continue
                latency = max(latency, links.wire(_edge(program.group, transfer)).latency_s)
                wires = capacities.wires(transfer)
                flows.append(Flow(transfer.source, transfer.target, elements, tuple(wires)))
                for wire in wires:
                    busy[wire] += elements / capacities.of(wire)
            for wire, seconds in busy.items():
                carried[wire] += seconds
            passage += max(busy.values(), default=0.0)
            walk.append(flows)
            startup += latency
            for seat in {end for flow in flows for end in (flow.source, flow.target)}:
                step_mine[seat] += latency
        for seat, seconds in step_mine.items():
            mine[seat] += seconds
            longest = max(longest, seconds)
    if links.group.size <= _FEW:
        passage = makespan(walk, {wire: capacities.of(wire) for wire in carried})
    if program.operation is Operation.BARRIER:
        whole = 1.0
    return RatedPrice(
        passage_s=passage / whole,
        busiest_s=max(carried.values(), default=0.0) / whole,
        startup_s=startup,
        rank_startup_s=max(mine.values(), default=0.0),
        rank_step_startup_s=longest,
    )


def _edge(group: Group, transfer: Transfer) -> Edge:
    return group.edge(transfer.source, transfer.target)


def halved(program: CollectiveProgram) -> CollectiveProgram:
    """Return the program with every all-reduce step as its two halves."""
    steps = tuple(half for step in program.steps for half in halves(step))
    return dataclasses.replace(program, steps=steps)


def halves(step: Step) -> Iterator[Step]:
    """Yield a step's halves, one after the other; most steps are their own."""
    if step.action is not Action.ALL_REDUCE:
        yield dataclasses.replace(step, after=())
        return
    for action in _HALVES.get(step.pattern, (Action.REDUCE_SCATTER, Action.ALL_GATHER)):
        yield dataclasses.replace(step, action=action, after=())


class _Capacities:
    """Which wires a transfer takes, and what they carry in a second."""

    def __init__(self, links: GroupLinks) -> None:
        self._links = links
        self._group = links.group
        self._nics: dict[tuple[int, int], float] = defaultdict(float)
        self._on_rail: dict[int, int] = defaultdict(int)
        for seat, rate in enumerate(links.rates):
            rail = self._group.rail_of(seat)
            self._nics[self._group.island_of(seat), rail] += rate
            self._on_rail[rail] += 1

    def wires(self, transfer: Transfer) -> list[Wire]:
        """Return the wires from a seat to a seat."""
        group, source, target = self._group, transfer.source, transfer.target
        edge = group.edge(source, target)
        if edge is Edge.ISLAND:
            return [("out", source, -1), ("in", target, -1)]
        links = [
            ("nic out", group.island_of(source), group.rail_of(source)),
            ("nic in", group.island_of(target), group.rail_of(target)),
        ]
        if edge is Edge.CROSS:
            links.append(("spine", 0, group.rail_of(source)))
        return links

    def of(self, wire: Wire) -> float:
        """Return the elements (bytes) per second of a wire."""
        what, number, rail = wire
        if what in ("out", "in"):
            return self._links.wire(Edge.ISLAND).bandwidth
        if what == "spine":
            return self._links.wire(Edge.CROSS).bandwidth * self._on_rail[rail]
        return self._nics[number, rail]


def lower_bound_seconds(operation: Operation, num_bytes: float, links: GroupLinks) -> float:
    """Return the time below which no program can be, for the NICs between the islands.

    Of an all-reduce of S bytes among K islands each must send S and receive S, and all together
    2·(K − 1)·S. The other operations: what must leave or reach an island, over its NICs.
    """
    group = links.group
    sizes = [island.size for island in group.islands]
    total, number = sum(sizes), len(sizes)
    rates = [sum(links.rates[seat] for seat in group.seats(i)) for i in range(number)]
    if number == 1:
        return 0.0
    match operation:
        case Operation.ALL_REDUCE:
            least = max(num_bytes / rate for rate in rates)
            return max(least, 2 * (number - 1) * num_bytes / sum(rates))
        case Operation.REDUCE_SCATTER | Operation.ALL_GATHER:
            each = max(
                num_bytes * (total - size) / total / rate
                for size, rate in zip(sizes, rates, strict=True)
            )
            return max(each, (number - 1) * num_bytes / sum(rates))
        case Operation.ALL_TO_ALL:
            leaving = [num_bytes * size * (total - size) / total**2 for size in sizes]
            return max(part / rate for part, rate in zip(leaving, rates, strict=True))
        case Operation.BROADCAST | Operation.REDUCE:
            return max(num_bytes / rate for rate in rates)
        case _:
            return 0.0
