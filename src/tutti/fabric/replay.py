"""Replay: what a collective program takes on a fabric, flow by flow.

What `comm` executes and `cost` prices is also sent over the wiring. *Collapsed*: every phase is one
solve; the edges of a team wait for each other, so that a team has one pace, and what it does not
use is others'. *Rounds*: each rank at its own pace, event by event. Latencies are added per round.
The flow model knows no queues: nothing is lost, marked or paused.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Literal

import numpy as np

from tutti.collective import CollectiveProgram, Layout, Operation
from tutti.collective.expand import rounds as program_rounds
from tutti.collective.phases import Phase, phases
from tutti.fabric.failures import Failures
from tutti.fabric.paths import Flows, Rules, route_transfers
from tutti.fabric.rounds import Flow, finish_times
from tutti.fabric.shares import fair_paces, fair_rates
from tutti.fabric.wiring import Floats, Integers, Wiring
from tutti.hardware.topology import Position

Grain = Literal["collapsed", "rounds"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """How a program went."""

    seconds: float
    latency_s: float  # of that, what rounds waited for their first byte
    bus_bandwidth: float  # per chip, as collective benchmarks count it
    slowest_flow: float  # bytes per second of the slowest connection
    flows: int


class Teams:
    """Transfers with paths, and the pace of the teams that they belong to."""

    def __init__(
        self,
        wiring: Wiring,
        sources: Integers,
        targets: Integers,
        num_bytes: Floats,
        teams: Integers,
        rules: Rules | None = None,
        failures: Failures | None = None,
    ) -> None:
        self.rules = rules or Rules.of(wiring)
        self.flows = route_transfers(wiring, sources, targets, self.rules, failures)
        self.num_bytes = num_bytes
        self.teams = teams
        self._wiring, self._ends = wiring, (sources, targets)

    def paces(self, efficiency: float | Floats = 1.0) -> Floats:
        """Return, per team, the share of its bytes that it moves in a second."""
        flows, each = self.flows, self.flows.per_transfer
        rates = flows.rates * efficiency
        share = np.full(flows.size, 1.0 / each)
        if self.rules.elastic and each > 1:
            alone = fair_rates(flows.links, rates).reshape(-1, each)
            whole = alone.sum(axis=1, keepdims=True)
            share = np.where(whole > 0, alone / np.maximum(whole, 1e-300), 1.0 / each).ravel()
        weights = np.repeat(self.num_bytes, each) * share
        order = np.argsort(np.repeat(self.teams, each), kind="stable")
        width = flows.links.shape[1]
        counts = np.bincount(self.teams) * each * width
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        return fair_paces(offsets, flows.links[order], np.repeat(weights[order], width), rates)

    def connections(self, efficiency: float | Floats = 1.0) -> Floats:
        """Return the bytes per second of each connection, all sending at once."""
        return fair_rates(self.flows.links, self.flows.rates * efficiency)

    @property
    def latency_s(self) -> float:
        """The longest latency among the transfers."""
        return longest_latency(self._wiring, *self._ends, self.flows)


def longest_latency(wiring: Wiring, sources: Integers, targets: Integers, flows: Flows) -> float:
    """Return the longest latency between pairs of chips; pairs with alike paths are alike."""
    if not len(sources):
        return 0.0
    first = flows.links[:: flows.per_transfer]
    hops = (first >= 0).sum(axis=1)
    key = (hops * len(wiring.cluster.pools) + wiring.chip_pool[sources]) * len(
        wiring.cluster.pools
    ) + wiring.chip_pool[targets]
    inside = wiring.chip_node[sources] == wiring.chip_node[targets]
    _, examples = np.unique(key * 2 + inside, return_index=True)
    return max(
        wiring.cluster.link(
            wiring.position(int(sources[at])), wiring.position(int(targets[at]))
        ).latency_s
        for at in examples
    )


def replay(
    program: CollectiveProgram,
    chips: Sequence[Position],
    wiring: Wiring,
    num_bytes: float,
    *,
    rules: Rules | None = None,
    failures: Failures | None = None,
    grain: Grain = "collapsed",
    efficiency: float = 1.0,
    inside: float | None = None,
    hop_s: float = 0.0,
    beside: Sequence[Sequence[Position]] = (),
) -> Replay:
    """Return how a program goes that moves `num_bytes` of whole buffer among some chips.

    `chips` are those of the group's ranks, in the ranks' order; `efficiency` is what of the links'
    rates a software stack makes use of, `inside` what of an island's native ones, whose library
    then starts a step once; `hop_s` is added to each other round. Collapsed, groups `beside` this
    one do the same at the same time.
    """
    if beside and grain == "rounds":
        raise ValueError("rounds are followed for one group at a time")
    everyone = np.array([_seats(program, own, wiring) for own in (chips, *beside)], dtype=np.int64)
    seats = everyone[0]
    layout = Layout.of(program, _elements(program, num_bytes))
    scale = num_bytes / max(layout.total, 1)
    if grain == "rounds":
        return _by_rounds(program, seats, wiring, layout, scale, rules, failures, efficiency)
    steps: list[float] = []
    latency, slowest, flows = 0.0, np.inf, 0
    carried: Floats | None = None
    for index in range(len(program.steps)):
        seconds = 0.0
        for phase in phases(program, index, layout):
            if not len(phase.sources):
                continue
            teams = _teams(phase, everyone, scale, wiring, rules, failures)
            used = _used(wiring, efficiency, inside, len(teams.flows.rates))
            whole = inside is not None and is_native(teams, wiring)
            waits = (teams.latency_s + hop_s) * (1 if whole else phase.rounds)
            seconds += _phase_seconds(teams, used) + waits
            latency += waits
            slowest = min(slowest, float(teams.connections(used).min(initial=np.inf)))
            flows = max(flows, teams.flows.size)
            load = busy_seconds(teams, used)
            base = load[: wiring.num_links]
            carried = base if carried is None else carried + base
        steps.append(seconds)
    busiest = 0.0 if carried is None else float(carried.max())
    total = sum(steps) + (program.chunks - 1) * max(max(steps, default=0.0), busiest)
    return Replay(
        seconds=total, latency_s=latency, bus_bandwidth=bus_bandwidth(program, num_bytes, total),
        slowest_flow=slowest, flows=flows,
    )  # fmt: skip


def _elements(program: CollectiveProgram, num_bytes: float) -> int:
    """Return a section's elements: enough that no part is rounded away; bytes are scaled to."""
    return 5040 * max(1, program.group.size) * program.chunks if num_bytes else 0


def _seats(program: CollectiveProgram, chips: Sequence[Position], wiring: Wiring) -> list[int]:
    place = {rank: chips[at] for at, rank in enumerate(sorted(program.group.ranks))}
    return [wiring.chip(place[rank]) for rank in program.group.ranks]


def is_native(teams: Teams, wiring: Wiring) -> bool:
    """Tell whether all flows stay on native links of islands."""
    first = teams.flows.links[:, 0]
    return bool(((first >= wiring.island_out) & (first < wiring.bridge_out)).all())


def _used(wiring: Wiring, efficiency: float, inside: float | None, links: int) -> float | Floats:
    """Return what of each link's rate is made use of."""
    if inside is None:
        return efficiency
    shares = np.full(links, efficiency)
    shares[wiring.island_out : wiring.bridge_out] = inside
    return shares


def _teams(
    phase: Phase,
    everyone: Integers,
    scale: float,
    wiring: Wiring,
    rules: Rules | None,
    failures: Failures | None,
) -> Teams:
    many = len(everyone)
    apart = np.arange(many)[:, None] * (int(phase.teams.max()) + 1)
    return Teams(
        wiring, everyone[:, phase.sources].ravel(), everyone[:, phase.targets].ravel(),
        np.tile(phase.elements.astype(np.float64) * scale, many),
        (apart + phase.teams[None, :]).ravel(), rules, failures,
    )  # fmt: skip


def _phase_seconds(teams: Teams, efficiency: float | Floats) -> float:
    paces = teams.paces(efficiency)
    used = paces[np.bincount(teams.teams, minlength=len(paces)) > 0]
    return 1.0 / float(used.min()) if used.min() > 0 else np.inf


def busy_seconds(teams: Teams, efficiency: float | Floats = 1.0) -> Floats:
    """Return for how long each link is busy with what the teams send over it."""
    flows = teams.flows
    weights = np.repeat(teams.num_bytes / flows.per_transfer, flows.per_transfer)
    used = flows.links >= 0
    each = np.broadcast_to(weights[:, None], flows.links.shape)[used]
    load = np.bincount(flows.links[used], weights=each, minlength=len(flows.rates))
    rates = flows.rates * efficiency
    seconds: Floats = np.divide(load, rates, out=np.zeros_like(load), where=rates > 0)
    return seconds


def bus_bandwidth(program: CollectiveProgram, num_bytes: float, seconds: float) -> float:
    """Return what each chip's link would have to carry if the program lost nothing."""
    size = program.group.size
    if seconds <= 0 or size < 2:
        return 0.0
    factor = 2.0 if program.operation is Operation.ALL_REDUCE else 1.0
    if program.operation in (Operation.BROADCAST, Operation.REDUCE, Operation.SEND_RECEIVE):
        return num_bytes / seconds
    return factor * (size - 1) / size * num_bytes / seconds


def _by_rounds(
    program: CollectiveProgram,
    seats: Integers,
    wiring: Wiring,
    layout: Layout,
    scale: float,
    rules: Rules | None,
    failures: Failures | None,
    efficiency: float,
) -> Replay:
    """Follow every rank through its rounds; the flows of a pair keep their paths."""
    program = dataclasses.replace(program, chunks=1)
    pairs: dict[tuple[int, int], int] = {}
    listed: list[list[tuple[int, int, float, int]]] = []
    for step in program.steps:
        for one in program_rounds(program, step):
            sizes: dict[tuple[int, int], float] = defaultdict(float)
            for transfer in one:
                sizes[transfer.source, transfer.target] += layout.size(transfer.part) * scale
            listed.append([
                (a, b, size, pairs.setdefault((a, b), len(pairs)))
                for (a, b), size in sizes.items() if size > 0 and a != b
            ])  # fmt: skip
    ends = np.array(list(pairs), dtype=np.int64).reshape(-1, 2)
    used = rules or Rules.of(wiring)
    flows = route_transfers(wiring, seats[ends[:, 0]], seats[ends[:, 1]], used, failures)
    walk = [
        [flow for a, b, size, pair in one for flow in pair_flows(flows, pair, a, b, size, used)]
        for one in listed
    ]
    seconds = max(finish_times(walk, capacities(flows, efficiency)).values(), default=0.0)
    latency = longest_latency(wiring, seats[ends[:, 0]], seats[ends[:, 1]], flows) * len(walk)
    total = seconds + latency
    return Replay(
        seconds=total, latency_s=latency,
        bus_bandwidth=bus_bandwidth(program, layout.total * scale, total),
        slowest_flow=float(fair_rates(flows.links, flows.rates * efficiency).min(initial=np.inf)),
        flows=flows.size,
    )  # fmt: skip


def pair_flows(
    flows: Flows, pair: int, source: int, target: int, size: float, rules: Rules
) -> list[Flow]:
    """Return the flows that one transfer of a pair is: its connections."""
    each = flows.per_transfer
    rows = flows.links[pair * each : (pair + 1) * each]
    ways = [tuple(int(link) for link in row if link >= 0) for row in rows]
    if rules.elastic:
        return [Flow(source, target, size, ways[0], further=tuple(ways[1:]))]
    return [Flow(source, target, size / each, way) for way in ways]


def capacities(flows: Flows, efficiency: float = 1.0) -> Mapping[Hashable, float]:
    """Return the rates of the links that some flow takes."""
    used = np.unique(flows.links[flows.links >= 0])
    return {int(link): float(flows.rates[link]) * efficiency for link in used}
