"""What running jobs do to each other on the fabric.

Every job has a *habit*: how long a step is, which share of it is spent sending on a perfect
network, and in which pattern; or it is a plan, which says all that itself. Its bytes are routed
over the wiring once per placement. Links whose senders together want more than there is join jobs
into components; each is followed by `rhythm`.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from tutti.errors import InputError
from tutti.fabric.paths import route_transfers
from tutti.fabric.wiring import Floats, Integers, Wiring
from tutti.fleet.chips import Grounds, bits
from tutti.fleet.machine import Machine
from tutti.fleet.request import JobRequest, Shape
from tutti.fleet.send_offsets import Rhythm, computing_s, periods, propose_offsets
from tutti.simulate.step_traffic import StepTraffic

_CHANGED = 1e-6
_MOST_KNOWN = 20_000
_ALIKE = 0.01  # periods that differ by less stay in step for long enough
_MOST_TOGETHER = 10  # jobs of a component that are followed; more are averaged


class Pattern(StrEnum):
    """To whom the nodes of a job send."""

    RING = "ring"  # to the next one, along the wire: data parallel
    ALL_TO_ALL = "all_to_all"  # to everybody alike: experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Habit:
    """What a job's steps are like."""

    step_s: float = 10.0  # on a perfect network
    share: float = 0.2  # of it, in which the NICs are busy
    pattern: Pattern = Pattern.RING

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1:
            raise InputError(f"a share of {self.share:g} for sending; give 0 or more, below 1")
        if not self.step_s > 0:
            raise InputError(f"steps of {self.step_s:g} s; give more than 0")


class SharedNetwork:
    """The fabric of a fleet with the habits of its jobs."""

    def __init__(
        self, grounds: Grounds, habits: Mapping[str, Habit | StepTraffic] | None = None,
        usual: Habit | None = None, *, together: bool = True,
    ) -> None:  # fmt: skip
        self.grounds, self.habits, self.usual = grounds, habits or {}, usual or Habit()
        self.together = together
        self.rates = grounds.wiring.rates
        self._rhythms: dict[tuple[Habit | StepTraffic, int], Rhythm] = {}
        self._paced: dict[str, tuple[int, float]] = {}  # nodes and stretch, as last said
        self._components: dict[frozenset[tuple[str, int]], dict[str, float]] = {}
        self._average: Floats = np.zeros(len(self.rates))

    def habit(self, job: str) -> Habit | StepTraffic:
        """Return what a job's steps are like."""
        return self.habits.get(job, self.usual)

    # --- what the scheduler asks ---------------------------------------------------------

    def stretch(self, request: JobRequest, mask: int) -> float:
        """Return how much longer steps take on these nodes, beside what is sent on average."""
        if mask & (mask - 1) == 0:
            return 1.0
        habit = self.habit(request.job)
        if isinstance(habit, StepTraffic) and self._is_part(request, mask):
            return 1.0
        rhythm = self.rhythm(habit, mask)
        rates = self.rates[rhythm.links]
        left = np.maximum(rates - self._average[rhythm.links], 0.1 * rates)
        slowest = float((rhythm.demand / left).max(initial=0.0))
        return rhythm.slowed_s(slowest) / habit.step_s

    def _is_part(self, request: JobRequest, mask: int) -> bool:
        """Tell whether these are the nodes of some pools only of a shape over more of them.

        A job over several pools is placed pool by pool; a plan's bytes can be routed over all of
        its nodes only, so that a part of them has no price.
        """
        if all(len(shape.nodes) == 1 for shape in request.shapes):
            return False
        given = _by_pool(self.grounds, mask)
        shapes = [dict(shape.nodes) for shape in request.shapes]
        return given not in shapes and any(given.items() <= shape.items() for shape in shapes)

    def rhythm(self, habit: Habit | StepTraffic, mask: int) -> Rhythm:
        """Return a job's rhythm alone on some nodes."""
        key = (habit, mask)
        if key not in self._rhythms:
            if len(self._rhythms) >= _MOST_KNOWN:
                self._rhythms.clear()
            makes = _planned if isinstance(habit, StepTraffic) else _rhythm
            self._rhythms[key] = makes(self.grounds, habit, bits(mask))  # type: ignore[arg-type]
        return self._rhythms[key]

    # --- what users ask ------------------------------------------------------------------

    def turns(self, placed: Mapping[str, int]) -> list[tuple[dict[str, float], float]]:
        """Return who should begin how much later on links they share, and what of steps it saves.

        Only where it helps, and where nodes are told by a mask; jobs that drift are offered none.
        """
        rhythms = {
            job: (mask, self.rhythm(self.habit(job), mask))
            for job, mask in placed.items() if mask & (mask - 1)
        }  # fmt: skip
        offered = []
        for members in self._joined(rhythms):
            jobs = [rhythms[job][1] for job in members]
            longest, shortest = (most(one.period_s for one in jobs) for most in (max, min))
            if not 1 < len(members) <= _MOST_TOGETHER or longest > shortest * (1 + _ALIKE):
                continue
            offsets = propose_offsets(*_compact(jobs, self.rates))
            if offsets.helps:
                offered.append((dict(zip(members, offsets.seconds, strict=True)), offsets.gain))
        return offered

    # --- what the simulation asks --------------------------------------------------------

    def solve(self, machine: Machine) -> dict[str, float]:
        """Return the stretch of every job whose steps have become longer or shorter."""
        changed: dict[str, float] = {}
        placed: dict[str, tuple[int, Rhythm]] = {}
        for job, run in machine.running.items():
            if len(run.allocation.nodes) > 1 and run.target is None:
                mask = run.allocation.mask
                placed[job] = (mask, self.rhythm(self.habit(job), mask))
        for members in self._joined(placed):
            stretches = self._component(members, placed)
            for job in members:
                mask = placed[job][0]
                known = self._paced.get(job)
                if known is None or abs(known[1] - stretches[job]) > _CHANGED:
                    changed[job] = stretches[job]
                self._paced[job] = (mask, stretches[job])
        for job in [job for job in self._paced if job not in placed]:
            del self._paced[job]
        return changed

    def _joined(self, placed: Mapping[str, tuple[int, Rhythm]]) -> list[list[str]]:
        """Return jobs in components that share links which cannot carry all of them at once."""
        wanted: Floats = np.zeros(len(self.rates))
        self._average = np.zeros(len(self.rates))
        for _, rhythm in placed.values():
            wanted[rhythm.links] += rhythm.demand
            self._average[rhythm.links] += rhythm.demand * rhythm.send_s / rhythm.period_s
        crowded = wanted > self.rates * (1 + 1e-9)
        parent = {job: job for job in placed}

        def root(job: str) -> str:
            while parent[job] != job:
                parent[job] = parent[parent[job]]
                job = parent[job]
            return job

        first: dict[int, str] = {}
        if self.together:
            for job, (_, rhythm) in placed.items():
                for link in rhythm.links[crowded[rhythm.links]].tolist():
                    parent[root(job)] = root(first.setdefault(link, job))
        groups: dict[str, list[str]] = defaultdict(list)
        for job in placed:
            groups[root(job)].append(job)
        return list(groups.values())

    def _component(
        self, members: list[str], placed: Mapping[str, tuple[int, Rhythm]]
    ) -> dict[str, float]:
        key = frozenset((job, placed[job][0]) for job in members)
        if key in self._components:
            return self._components[key]
        rhythms = [placed[job][1] for job in members]
        if len(members) == 1:
            lasting = [rhythms[0].period_s]
        elif len(members) <= _MOST_TOGETHER:
            offsets = [
                _phase(job) * one.period_s for job, one in zip(members, rhythms, strict=True)
            ]
            lasting = periods(*_compact(rhythms, self.rates), offsets)
        else:
            lasting = [self._averaged(one) for one in rhythms]
        stretches = {
            job: max(1.0, period / self.habit(job).step_s)
            for job, period in zip(members, lasting, strict=True)
        }
        if len(self._components) >= _MOST_KNOWN:
            self._components.clear()
        self._components[key] = stretches
        return stretches

    def _averaged(self, one: Rhythm) -> float:
        """Return a period beside many others: they take what they take on average."""
        rates = self.rates[one.links]
        others = self._average[one.links] - one.demand * one.send_s / one.period_s
        left = np.maximum(rates - others, 0.1 * rates)
        return one.slowed_s(float((one.demand / left).max(initial=0.0)))


def _compact(rhythms: Sequence[Rhythm], rates: Floats) -> tuple[list[Rhythm], Floats]:
    """Return jobs with the links numbered that some of them use, and the rates of those."""
    used = np.unique(np.concatenate([one.links for one in rhythms]))
    own = [replace(one, links=np.searchsorted(used, one.links)) for one in rhythms]
    return own, rates[used]


def _phase(job: str) -> float:
    """Return where in its step a job is when others look: as good as chance, always the same."""
    return int.from_bytes(hashlib.sha256(job.encode()).digest()[:4], "big") / 2**32


def _planned(grounds: Grounds, steps: StepTraffic, nodes: list[int]) -> Rhythm:
    """Route what a plan sends in a step, its nodes put onto these, neighbours beside neighbours."""
    wiring = grounds.wiring
    chosen = _seats(grounds, steps, nodes)
    first = np.concatenate([[0], np.cumsum([grounds.sizes[p] for p in grounds.node_pool])])
    sources = first[chosen[steps.sources]] + steps.source_slots
    targets = first[chosen[steps.targets]] + steps.target_slots
    carried = _above(wiring, sources, targets, steps.num_bytes)
    links = np.flatnonzero(carried)
    least = float((carried[links] / wiring.rates[links]).max(initial=0.0))
    send_s = max(least, steps.sending_s)
    return Rhythm(
        compute_s=computing_s(steps.step_s - steps.sending_s, steps.felt, send_s - steps.sending_s),
        send_s=send_s, links=links, felt=steps.felt,
        demand=carried[links] / send_s if send_s > 0 else carried[links],
    )  # fmt: skip


def _seats(grounds: Grounds, steps: StepTraffic, nodes: list[int]) -> Integers:
    """Return the node that each of a plan's nodes becomes: of its pool, in order of the wire."""
    free: dict[str, list[int]] = defaultdict(list)
    for node in _along_the_wire(grounds, nodes):
        free[grounds.pool_names[grounds.node_pool[node]]].append(node)
    given = {pool: len(members) for pool, members in free.items()}
    why = why_unfit(grounds, steps, given)
    if why is not None:
        raise InputError(why)
    (only,) = given if len(given) == 1 else (None,)
    return np.array([free[only or pool].pop(0) for pool, _ in steps.nodes], dtype=np.int64)


def why_unfit(grounds: Grounds, steps: StepTraffic, given: Mapping[str, int]) -> str | None:
    """Return why a plan cannot run on so many nodes of these pools; None: it can."""
    asked: Mapping[str, int] = Counter(pool for pool, _ in steps.nodes)
    only = None
    if len(asked) == len(given) == 1:  # of one kind: the pool's name is another cluster's
        (only,) = given
        asked = {only: len(steps.nodes)}
    if dict(asked) != dict(given):
        return (
            f"{steps.name} is planned for {_counted(asked)}, the job is given {_counted(given)}; "
            "plan it for what it asks for"
        )
    widest = np.zeros(len(steps.nodes), dtype=np.int64)
    for rows, slots in (
        (steps.sources, steps.source_slots), (steps.targets, steps.target_slots),
    ):  # fmt: skip
        np.maximum.at(widest, rows, slots + 1)
    for (pool, _), needs in zip(steps.nodes, widest.tolist(), strict=True):
        has = grounds.sizes[grounds.pool_names.index(only or pool)]
        if needs > has:
            return (
                f"{steps.name} sends from {needs} chips of a node, those of pool "
                f"'{only or pool}' have {has}; plan it for such nodes"
            )
    return None


def fitting_shapes(
    grounds: Grounds, steps: StepTraffic, shapes: tuple[Shape, ...]
) -> tuple[Shape, ...]:
    """Return the shapes of a job that its plan can run on; InputError where there are none."""
    reasons = [why_unfit(grounds, steps, dict(shape.nodes)) for shape in shapes]
    kept = tuple(shape for shape, why in zip(shapes, reasons, strict=True) if why is None)
    if not kept:
        raise InputError(str(reasons[0]))
    return kept


def _by_pool(grounds: Grounds, mask: int) -> dict[str, int]:
    counts = [(mask & own).bit_count() for own in grounds.pool_masks]
    return {name: n for name, n in zip(grounds.pool_names, counts, strict=True) if n}


def _counted(pools: Mapping[str, int]) -> str:
    return " and ".join(f"{count} nodes of '{pool}'" for pool, count in sorted(pools.items()))


def _along_the_wire(grounds: Grounds, nodes: list[int]) -> list[int]:
    return sorted(nodes, key=lambda node: (*(g[node] for g in reversed(grounds.node_group)), node))


def _above(wiring: Wiring, sources: Integers, targets: Integers, num_bytes: Floats) -> Floats:
    """Return the bytes on each link above the NICs, which are a job's own."""
    flows = route_transfers(wiring, sources, targets)
    used = flows.links >= 0
    weights = np.repeat(num_bytes / flows.per_transfer, flows.per_transfer)
    spread = np.broadcast_to(weights[:, None], flows.links.shape)[used]
    load = np.bincount(flows.links[used], weights=spread, minlength=len(flows.rates))
    carried: Floats = load[: wiring.num_links].astype(np.float64)
    carried[wiring.island_out :] = 0.0
    # NICs are a job's own, and busy for as long as its habit says; what it shares lies above them
    carried[: 2 * wiring.num_ports] = 0.0
    return carried


def _rhythm(grounds: Grounds, habit: Habit, nodes: list[int]) -> Rhythm:
    """Route what a job sends in a step."""
    wiring = grounds.wiring
    nodes = _along_the_wire(grounds, nodes)
    sources, targets, shares = _transfers(grounds, habit.pattern, nodes)
    nics = np.array([wiring.cluster.pools[grounds.node_pool[n]].node.nic_bandwidth for n in nodes])
    chips = np.array([grounds.sizes[grounds.node_pool[n]] for n in nodes])
    seconds = habit.share * habit.step_s
    each = shares * float((nics / chips).min()) * seconds
    carried = _above(wiring, sources, targets, each)
    above = np.flatnonzero(carried)
    if habit.share == 0:
        return Rhythm(compute_s=habit.step_s, send_s=0.0, links=above[:0], demand=np.zeros(0))
    send = float((carried[above] / wiring.rates[above]).max(initial=0.0))
    return Rhythm(
        compute_s=habit.step_s - seconds, send_s=max(send, seconds), links=above,
        demand=carried[above] / max(send, seconds),
    )  # fmt: skip


def _transfers(
    grounds: Grounds, pattern: Pattern, nodes: list[int]
) -> tuple[Integers, Integers, Floats]:
    """Return chips that send, chips that they send to, and the share of a NIC's bytes."""
    pairs: list[tuple[int, int, float]] = []
    if pattern is Pattern.RING:
        pairs = [(a, b, 1.0) for a, b in zip(nodes, [*nodes[1:], nodes[0]], strict=True)]
    else:
        groups: dict[int, list[int]] = defaultdict(list)
        for node in nodes:
            groups[grounds.node_group[0][node] if grounds.node_group else 0].append(node)
        for own, members in groups.items():
            for place, node in enumerate(members):
                for other, there in groups.items():
                    # one partner stands for all of a group: the links between groups are the same
                    at = (place + 1) % len(there) if other == own else place % len(there)
                    size = len(there) - (other == own)
                    if size:
                        pairs.append((node, there[at], size / (len(nodes) - 1)))
    wiring = grounds.wiring
    first = np.concatenate([[0], np.cumsum([grounds.sizes[p] for p in grounds.node_pool])])
    sources, targets, shares = [], [], []
    for a, b, share in pairs:
        slots = min(grounds.sizes[grounds.node_pool[a]], grounds.sizes[grounds.node_pool[b]])
        sources.append(first[a] + np.arange(slots))
        targets.append(first[b] + np.arange(slots))
        shares.append(np.full(slots, share))
    assert wiring.num_chips == first[-1]
    return np.concatenate(sources), np.concatenate(targets), np.concatenate(shares)
