"""How long rounds of transfers take when no rank waits for the others' rounds, only for its own.

A rank enters its next round when what it sends and receives in this one is done. Ranks with fast
NICs run ahead, and their later messages share wires with what slow ranks still wait for. Wires are
shared fairly (max-min). Sizes are elements, rates elements per second; latencies are not counted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tutti.fabric.shares import fair_rates

_DONE = 1e-9  # of a transfer: what rounding leaves over
_MANY = 48  # transfers at a time, from which on compiled shares are faster

Wires = tuple[Hashable, ...]


@dataclass(slots=True)
class Flow:
    """One transfer: from whom to whom, how much, and over which wires.

    One that is spread over several connections as there is room has `further` ways.
    """

    source: int
    target: int
    size: float
    wires: Wires
    left: float = 0.0
    further: tuple[Wires, ...] = ()


def makespan(rounds: Sequence[Sequence[Flow]], capacity: Mapping[Hashable, float]) -> float:
    """Return when the last transfer is over."""
    return max(finish_times(rounds, capacity).values(), default=0.0)


def finish_times(
    rounds: Sequence[Sequence[Flow]], capacity: Mapping[Hashable, float]
) -> dict[int, float]:
    """Return when each rank's last transfer is over."""
    turns = _Turns(rounds)
    shares = _Shares(capacity)
    active = list(turns.start())
    now, done = 0.0, {}
    while active:
        rates = shares.of(active)
        step = min(flow.left / rate for flow, rate in zip(active, rates, strict=True))
        now += step
        still: list[Flow] = []
        over: list[Flow] = []
        for flow, rate in zip(active, rates, strict=True):
            flow.left -= rate * step
            (over if flow.left <= _DONE * flow.size else still).append(flow)
        for flow in over:
            done[flow.source] = done[flow.target] = now
        active = still + list(turns.finish(over))
    return done


class _Turns:
    """Who is in which round."""

    def __init__(self, rounds: Sequence[Sequence[Flow]]) -> None:
        self._queues: dict[int, list[tuple[int, list[Flow]]]] = defaultdict(list)
        self._open: Counter[tuple[int, int]] = Counter()  # (rank, round) → transfers not yet over
        self._round: dict[int, int] = {}
        for number, flows in enumerate(rounds):
            sends: dict[int, list[Flow]] = defaultdict(list)
            for flow in flows:
                flow.left = flow.size
                self._round[id(flow)] = number
                sends[flow.source].append(flow)
                self._open[flow.source, number] += 1
                self._open[flow.target, number] += 1
            for rank in {rank for flow in flows for rank in (flow.source, flow.target)}:
                self._queues[rank].append((number, sends[rank]))

    def start(self) -> Iterable[Flow]:
        """Let every rank enter its first round; yield what it sends."""
        for rank in list(self._queues):
            self._queues[rank].reverse()  # the next one last, where it is taken from
            yield from self._enter(rank)

    def _enter(self, rank: int) -> Iterable[Flow]:
        return self._queues[rank][-1][1] if self._queues[rank] else ()

    def finish(self, flows: Iterable[Flow]) -> Iterable[Flow]:
        """Note that transfers are over; yield what ranks that go on send next."""
        ranks = set()
        for flow in flows:
            for rank in (flow.source, flow.target):
                self._open[rank, self._round[id(flow)]] -= 1
                ranks.add(rank)
        for rank in sorted(ranks):
            queue = self._queues[rank]
            # a message may come before its round: the round is then over as soon as it begins
            while queue and not self._open[rank, queue[-1][0]]:
                queue.pop()
                yield from self._enter(rank)


class _Shares:
    """Max-min fair rates of transfers that change from event to event."""

    def __init__(self, capacity: Mapping[Hashable, float]) -> None:
        self._capacity = capacity
        self._numbers = {wire: number for number, wire in enumerate(capacity)}
        self._rates = np.array(list(capacity.values()), dtype=np.float64)

    def of(self, flows: Sequence[Flow]) -> list[float]:
        """Return the rate of every transfer, over all its ways."""
        ways = [way for flow in flows for way in (flow.wires, *flow.further)]
        rates = self._many(ways) if len(ways) >= _MANY else _fair(ways, self._capacity)
        if len(ways) == len(flows):
            return rates
        totals, at = [], 0
        for flow in flows:
            totals.append(sum(rates[at : at + 1 + len(flow.further)]))
            at += 1 + len(flow.further)
        return totals

    def _many(self, ways: Sequence[Wires]) -> list[float]:
        widest = max(map(len, ways))
        paths = np.full((len(ways), widest), -1, dtype=np.int32)
        for row, way in enumerate(ways):
            for column, wire in enumerate(way):
                paths[row, column] = self._numbers[wire]
        rates: list[float] = fair_rates(paths, self._rates).tolist()
        return rates


def _fair(ways: Sequence[Wires], capacity: Mapping[Hashable, float]) -> list[float]:
    """Return the max-min fair rate of every way, where they are few."""
    left = dict(capacity)
    users: dict[Hashable, set[int]] = defaultdict(set)
    for number, wires in enumerate(ways):
        for wire in wires:
            users[wire].add(number)
    rates = [0.0] * len(ways)
    while users:
        wire, share = min(
            ((wire, left[wire] / len(user_flows)) for wire, user_flows in users.items()),
            key=lambda one: one[1],
        )
        for number in list(users[wire]):
            rates[number] = share
            for other in ways[number]:
                left[other] -= share
                users[other].discard(number)
                if not users[other]:
                    del users[other]
    return rates
