"""Plans on a fabric: what their traffic takes, alone and beside each other, and what the step is.

Each kind of traffic is routed once and replayed alone. Then the simulated steps say which kinds
are under way at the same time, and for how long; the sets that last longest are solved together.
A kind's seconds are those it takes alone × how much slower it is, on average, in company; the step
is simulated again with them. Several plans repeat their steps beside each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tutti.collective import Operation
from tutti.errors import InputError
from tutti.fabric.failures import Failures
from tutti.fabric.in_switch import Trees, addable
from tutti.fabric.paths import Rules
from tutti.fabric.replay import Teams, busy_seconds, is_native
from tutti.fabric.shares import fair_paces
from tutti.fabric.wiring import Floats, Integers, Wiring
from tutti.hardware.fabric import Routing
from tutti.simulate.estimate import Estimate
from tutti.simulate.inside_traffic import added_seconds
from tutti.simulate.result import SimulationResult
from tutti.simulate.run import simulate
from tutti.simulate.traffic import Flight, Traffic

IN_SWITCH = "in switch"
MOST_SETS = 48  # of traffic under way together that are solved, longest first
_REPEATS = 4  # of the longest step that several plans are followed for


@dataclass(slots=True, kw_only=True, eq=False)
class Sent:
    """One kind of traffic on the fabric."""

    traffic: Traffic
    program: str  # that it ran as
    priced_s: float  # by the cost model
    alone_s: float
    shared_s: float = 0.0  # beside what the same plan sends at the time
    together_s: float = 0.0  # beside the other plans, too
    slowest_flow: float
    flows: int
    whole: Teams  # all its flights as one
    links: Integers  # that it uses
    bytes_by_link: Floats  # of one run, on each of them
    pace: float  # of `whole`, alone
    load: Floats  # bytes per second then, on each of these links

    @property
    def bus_bandwidth(self) -> float:
        """Bytes per second and chip that the collective comes to, as benchmarks count."""
        size, seconds = self.traffic.ranks, self.together_s
        if self.program == "send" or seconds <= 0:
            return 0.0
        factor = 2.0 if self.traffic.operation == "all_reduce" else 1.0
        return factor * (size - 1) / size * self.traffic.num_bytes / seconds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanOnFabric:
    """One plan's step on the fabric."""

    name: str
    estimate: Estimate
    sent: tuple[Sent, ...]
    priced_s: float  # the step as `tutti simulate` says
    alone_s: float
    result: SimulationResult  # simulated again, beside the other plans

    @property
    def together_s(self) -> float:
        """The step beside the other plans."""
        return self.result.step_seconds


def plans_on_fabric(
    names: Sequence[str],
    estimates: Sequence[Estimate],
    traffic: Sequence[Sequence[Traffic]],
    wiring: Wiring,
    *,
    rules: Rules | None = None,
    failures: Failures | None = None,
    in_switch: bool = False,
) -> list[PlanOnFabric]:
    """Send the traffic of plans over one fabric at the same time.

    `in_switch`: all-reduces are added up by the switches where that is faster.
    """
    _require_apart(names, estimates)
    sent = [
        [_alone(one, estimate, wiring, rules, failures, in_switch=in_switch) for one in own]
        for estimate, own in zip(estimates, traffic, strict=True)
    ]
    for estimate, own in zip(estimates, sent, strict=True):
        factors = _factors([(estimate, own)], wiring)
        for one, factor in zip(own, factors, strict=True):
            one.shared_s = one.together_s = one.alone_s * factor
    if len(estimates) > 1:
        factors = _factors(list(zip(estimates, sent, strict=True)), wiring)
        everyone = [one for own in sent for one in own]
        for one, factor in zip(everyone, factors, strict=True):
            one.together_s = max(one.shared_s, one.alone_s * factor)
    return [
        PlanOnFabric(
            name=name, estimate=estimate, sent=tuple(own),
            priced_s=estimate.result.step_seconds,
            alone_s=step_with(estimate, own, [one.shared_s for one in own]).step_seconds,
            result=step_with(estimate, own, [one.together_s for one in own]),
        )
        for name, estimate, own in zip(names, estimates, sent, strict=True)
    ]  # fmt: skip


def stall(
    traffic: Sequence[Traffic], wiring: Wiring, rules: Rules, failures: Failures
) -> tuple[float, int]:
    """Return for how long connections stand still when something fails, and how many do.

    Packets that are spread over all ways are counted by the ways that a hash would give them.
    """
    if rules.routing is Routing.SPRAY:
        rules = replace(rules, routing=Routing.ECMP)
    longest, hit = 0.0, 0
    for one in traffic:
        healthy = _teams(one.flights, wiring, rules, None).flows
        seconds, flows = failures.stalls(wiring, healthy.links)
        longest, hit = max(longest, seconds), hit + flows
    return longest, hit


def _require_apart(names: Sequence[str], estimates: Sequence[Estimate]) -> None:
    owner: dict[object, str] = {}
    for name, estimate in zip(names, estimates, strict=True):
        for _, _, stage in estimate.schedule.plan.stages():
            for chip in stage.chips:
                if owner.setdefault(chip, name) != name:
                    raise InputError(
                        f"{owner[chip]} and {name} both use chip {chip}; plan them on chips apart"
                    )


def _teams(
    flights: Sequence[Flight], wiring: Wiring, rules: Rules | None, failures: Failures | None
) -> Teams:
    return Teams(
        wiring,
        np.concatenate([flight.sources for flight in flights]),
        np.concatenate([flight.targets for flight in flights]),
        np.concatenate([flight.num_bytes for flight in flights]),
        np.concatenate([flight.teams for flight in flights]),
        rules, failures,
    )  # fmt: skip


def link_efficiency(wiring: Wiring, traffic: Traffic, links: int) -> Floats:
    """Return what of each link's rate the software makes use of."""
    efficiency = np.full(links, traffic.efficiency.fabric)
    efficiency[wiring.island_out : wiring.num_links] = traffic.efficiency.island
    return efficiency


def _alone(
    traffic: Traffic,
    estimate: Estimate,
    wiring: Wiring,
    rules: Rules | None,
    failures: Failures | None,
    *,
    in_switch: bool,
) -> Sent:
    """Replay one kind of traffic, nothing else under way."""
    steps: list[float] = []
    slowest, flows = np.inf, 0
    for flight in traffic.flights:
        teams = _teams([flight], wiring, rules, failures)
        efficiency = link_efficiency(wiring, traffic, len(teams.flows.rates))
        paces = teams.paces(efficiency)
        used = paces[np.bincount(flight.teams, minlength=len(paces)) > 0]
        if is_native(teams, wiring):  # whose library starts a step once
            waits = teams.latency_s + traffic.efficiency.startup_s
        else:
            waits = (teams.latency_s + traffic.efficiency.hop_s) * flight.rounds
        steps.append(waits + 1.0 / float(used.min()))
        slowest = min(slowest, float(teams.connections(efficiency).min(initial=np.inf)))
        flows = max(flows, teams.flows.size)
    whole = _teams(traffic.flights, wiring, rules, failures)
    efficiency = link_efficiency(wiring, traffic, len(whole.flows.rates))
    # a chunk passes all steps, the others follow at the pace of the slowest
    chunks = traffic.chunks
    seconds = (sum(steps) + (chunks - 1) * max(steps)) / chunks
    program = traffic.program
    added = _added_up(traffic, wiring, failures) if in_switch else None
    if added is not None and added[1] < seconds:
        (whole, seconds), program = added, IN_SWITCH
        efficiency = link_efficiency(wiring, traffic, len(whole.flows.rates))
        slowest, flows = float(whole.connections(efficiency).min()), whole.flows.size
    used = whole.paces(efficiency)
    links, carried = _bytes(whole, wiring)
    return Sent(
        traffic=traffic, program=program, priced_s=_priced(traffic, estimate), alone_s=seconds,
        slowest_flow=slowest, flows=flows, whole=whole, links=links, bytes_by_link=carried,
        pace=float(used[np.bincount(whole.teams, minlength=len(used)) > 0].min()),
        load=_load(whole, used)[links],
    )  # fmt: skip


def _added_up(
    traffic: Traffic, wiring: Wiring, failures: Failures | None
) -> tuple[Trees, float] | None:
    """Return an all-reduce as switches do it, and its seconds; None: they cannot."""
    if traffic.operation is not Operation.ALL_REDUCE or traffic.seats is None:
        return None
    if not addable(wiring, traffic.seats):
        return None
    trees = Trees(wiring, traffic.seats, traffic.num_bytes, failures)
    pace = float(trees.paces(link_efficiency(wiring, traffic, wiring.num_links)).min())
    waits = trees.latency_s + 2 * traffic.efficiency.hop_s
    return trees, waits + 1.0 / pace if pace > 0 else np.inf


def _priced(traffic: Traffic, estimate: Estimate) -> float:
    """Return what one run was priced at."""
    if traffic.inside is not None:
        return traffic.inside.priced_s
    at = traffic.first[0]
    index = estimate.result.program.class_of(int(at))
    seconds = estimate.priced.costs.classes[index].seconds
    return float(seconds[at - estimate.result.program.offsets[index]])


def _load(teams: Teams, paces: Floats) -> Floats:
    """Return the bytes per second on each link, every team at its pace."""
    flows = teams.flows
    rate = np.repeat(teams.num_bytes * paces[teams.teams], flows.per_transfer)
    used = flows.links >= 0
    each = np.broadcast_to((rate / flows.per_transfer)[:, None], flows.links.shape)[used]
    count = len(flows.rates)
    return np.bincount(flows.links[used], weights=each, minlength=count).astype(np.float64)


def _bytes(teams: Teams, wiring: Wiring) -> tuple[Integers, Floats]:
    carried = (busy_seconds(teams) * teams.flows.rates)[: wiring.num_links]
    used = np.flatnonzero(carried)
    return used, carried[used]


def _crowded(sent: Sequence[Sent], wiring: Wiring) -> list[Sent]:
    """Return the kinds with a link that all of them together could ask too much of.

    Whatever is under way beside the others, they do as alone, and nobody notices them.
    """
    asked, allowed = np.zeros(wiring.num_links), np.full(wiring.num_links, np.inf)
    for one in sent:
        asked[one.links] += one.load
        rates = one.whole.flows.rates[: wiring.num_links]
        allowed = np.minimum(allowed, rates * link_efficiency(wiring, one.traffic, len(rates)))
    full = asked > allowed * (1 + 1e-6)
    return [one for one in sent if full[one.links].any()]


def _sets(plans: Sequence[tuple[Estimate, Sequence[Sent]]]) -> dict[int, float]:
    """Return for how long each set of kinds is under way together; a set is a number's bits."""
    horizon = max(estimate.result.step_seconds for estimate, _ in plans)
    if len(plans) > 1:
        horizon *= _REPEATS
    times: list[Floats] = []
    bits: list[Integers] = []
    number = 0
    for estimate, own in plans:
        step = estimate.result.step_seconds
        turns = int(np.ceil(horizon / step)) if len(plans) > 1 and step > 0 else 1
        for one in own:
            start, end = one.traffic.windows(estimate.result, one.priced_s)
            lasting = end > start
            for turn in range(turns):
                for moment, sign in ((start[lasting], 1), (end[lasting], -1)):
                    times.append(moment + turn * step)
                    bits.append(np.full(len(moment), sign * (number + 1), dtype=np.int64))
            number += 1
    if not times:
        return {}
    moment, change = np.concatenate(times), np.concatenate(bits)
    order = np.lexsort((change, moment))
    found_sets: dict[int, float] = defaultdict(float)
    active, last = 0, 0.0
    depth = [0] * number
    for now, kind in zip(moment[order].tolist(), change[order].tolist(), strict=True):
        if active and now > last:
            found_sets[active] += now - last
        last = now
        at = abs(kind) - 1
        depth[at] += 1 if kind > 0 else -1
        active = active | (1 << at) if depth[at] > 0 else active & ~(1 << at)
    return found_sets


def _factors(plans: Sequence[tuple[Estimate, Sequence[Sent]]], wiring: Wiring) -> list[float]:
    """Return how many times longer each kind takes, on average over the time it is under way."""
    all_kinds = [one for _, own in plans for one in own]
    everyone = _crowded(all_kinds, wiring)
    kept = {id(one) for one in everyone}
    plans = [(estimate, [one for one in own if id(one) in kept]) for estimate, own in plans]
    longer, lasted = np.zeros(len(everyone)), np.zeros(len(everyone))
    sets = sorted(_sets(plans).items(), key=lambda item: (-item[1], item[0]))
    solved = 0
    for active, seconds in sets:
        members = [i for i in range(len(everyone)) if active >> i & 1]
        if len(members) == 1 or solved >= MOST_SETS:
            if len(members) == 1:
                longer[members] += seconds
                lasted[members] += seconds
            continue
        solved += 1
        paces = _together([everyone[i] for i in members], wiring)
        for i, pace in zip(members, paces, strict=True):
            longer[i] += seconds * max(1.0, everyone[i].pace / pace)
            lasted[i] += seconds
    means = np.divide(longer, lasted, out=np.ones_like(longer), where=lasted > 0).tolist()
    factors = dict(zip(map(id, everyone), means, strict=True))
    return [factors.get(id(one), 1.0) for one in all_kinds]


def _together(sent: Sequence[Sent], wiring: Wiring) -> list[float]:
    """Return the pace of each kind when all are under way: its slowest team's."""
    links, weights, counts, extra = [], [], [], []
    next_link = wiring.num_links
    efficiency = np.ones(wiring.num_links)
    widest = max(one.whole.flows.links.shape[1] for one in sent)
    for one in sent:
        flows, each = one.whole.flows, one.whole.flows.per_transfer
        rates = flows.rates * link_efficiency(wiring, one.traffic, len(flows.rates))
        efficiency = np.minimum(efficiency, link_efficiency(wiring, one.traffic, wiring.num_links))
        own = flows.links.astype(np.int64)
        own = np.where(own >= wiring.num_links, own - wiring.num_links + next_link, own)
        next_link += len(flows.rates) - wiring.num_links
        extra.append(rates[wiring.num_links :])
        order = np.argsort(np.repeat(one.whole.teams, each), kind="stable")
        padded = np.full((len(own), widest), -1, dtype=np.int64)
        padded[:, : own.shape[1]] = own[order]
        links.append(padded)
        share = np.repeat(one.whole.num_bytes / each, each)[order]
        weights.append(np.repeat(share, widest))
        counts.append(np.bincount(one.whole.teams) * each * widest)
    base = sent[0].whole.flows.rates[: wiring.num_links] * efficiency
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(counts))]).astype(np.int64)
    paces = fair_paces(
        offsets, np.concatenate(links).astype(np.int32), np.concatenate(weights),
        np.concatenate([base, *extra]),
    )  # fmt: skip
    ends = np.cumsum([len(count) for count in counts])
    return [float(part.min()) for part in np.split(paces, ends[:-1])]


def step_with(
    estimate: Estimate, sent: Sequence[Sent], seconds: Sequence[float]
) -> SimulationResult:
    """Return the step with these seconds of its traffic; the NICs' sharing is in them."""
    costs = estimate.priced.costs
    given = [costs_of.seconds.copy() for costs_of in costs.classes]
    offsets = estimate.result.program.offsets
    pairs = [(one.traffic, value) for one, value in zip(sent, seconds, strict=True)]
    for traffic, value in pairs:
        for index, at in traffic.instructions.items() if traffic.inside is None else ():
            given[index][at - int(offsets[index])] = value
    for index, added in added_seconds(pairs).items():
        given[index] += added
    classes = tuple(
        replace(old, seconds=new, leaves_node=None)
        for old, new in zip(costs.classes, given, strict=True)
    )
    return simulate(estimate.result.program, replace(costs, classes=classes))
