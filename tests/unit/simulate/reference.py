"""Random costs, and a naive simulator to hold the real one against.

The naive one knows the lists and the semantics of `simulate.run` only: it writes down what every
instruction waits for and sweeps over all of them until nothing changes.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from tutti.schedule.instruction import COLLECTIVES, Instruction, Lane, Op
from tutti.schedule.partners import Partners
from tutti.schedule.schedule import Schedule
from tutti.simulate import ClassCosts, StepCosts

Place = tuple[int, int]  # class, position in its list


def random_costs(schedule: Schedule, seed: int, *, zeros: float = 0.2) -> StepCosts:
    """Return seconds (some zero) and memory that every list gives back."""
    rng = np.random.default_rng(seed)
    found = []
    for rank_class in schedule.classes:
        size = len(rank_class.instructions)
        seconds = rng.uniform(0, 1, size) * (rng.uniform(size=size) >= zeros)
        taken, given = np.zeros(size), np.zeros(size)
        passes = [i for i, e in enumerate(rank_class.instructions) if e.lane is Lane.COMPUTE]
        for _ in range(len(passes)):
            a, b = sorted(rng.choice(passes, 2))
            amount = float(rng.integers(1, 1000))
            taken[a] += amount
            given[b] += amount
        found.append(
            ClassCosts(
                seconds=seconds,
                allocate_bytes=taken,
                free_bytes=given,
                static_bytes=float(rng.integers(0, 5000)),
            )
        )
    return StepCosts(classes=tuple(found))


def channel(entry: Instruction) -> object:
    if entry.op in (Op.SEND, Op.RECEIVE):
        return (entry.op, entry.start, entry.what)
    if entry.op in COLLECTIVES:
        return ("collectives", entry.scope)
    return entry.op if entry.lane is Lane.COPY else "compute"


def naive(schedule: Schedule, costs: StepCosts) -> dict[Place, tuple[float, float]]:
    """Return start and end of every instruction."""
    needs, together = waits(schedule)
    times: dict[Place, tuple[float, float]] = {}
    places = [(c, i) for c, k in enumerate(schedule.classes) for i in range(len(k.instructions))]
    while len(times) < len(places):
        before = len(times)
        for place in places:
            members = together[place]
            wanted = [need for member in members for need in needs[member]]
            if place in times or any(need not in times for need in wanted):
                continue
            start = max((times[need][1] for need in wanted), default=0.0)
            end = start + max(float(costs.classes[c].seconds[i]) for c, i in members)
            for member in members:
                times[member] = (start, end)
        assert len(times) > before, "the lists wait for each other"
    return times


def waits(schedule: Schedule) -> tuple[dict[Place, list[Place]], dict[Place, list[Place]]]:
    """Return what each instruction waits for, and which ones start and end with it."""
    partners = Partners(schedule)
    needs: dict[Place, list[Place]] = defaultdict(list)
    together: dict[Place, list[Place]] = {}
    sends: dict[object, list[Place]] = defaultdict(list)
    receives: dict[object, list[Place]] = defaultdict(list)
    meetings: dict[object, list[Place]] = defaultdict(list)
    for c, rank_class in enumerate(schedule.classes):
        last: dict[object, Place] = {}
        turns: dict[object, int] = defaultdict(int)
        for i, entry in enumerate(rank_class.instructions):
            place = (c, i)
            together[place] = [place]
            needs[place] += [(c, index) for index in entry.after]
            if channel(entry) in last:
                needs[place].append(last[channel(entry)])
            last[channel(entry)] = place
            wire = (rank_class.pipeline, entry.what, entry.start, entry.micro_batch)
            if entry.op is Op.SEND:
                sends[wire].append(place)
            elif entry.op is Op.RECEIVE:
                receives[wire].append(place)
            elif (met := partners.meeting(c, entry)) is not None:
                turns[met[0]] += 1
                meetings[met[0], turns[met[0]]].append(place)
    for wire, places in receives.items():
        for place in places:
            needs[place] += sends[wire]
    for places in meetings.values():
        for place in places:
            together[place] = places
    return needs, together
