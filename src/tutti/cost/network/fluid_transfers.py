"""How long rounds of transfers take when no rank waits for the others' rounds, only for its own.

A rank enters its next round when what it sends and receives in this one is done. Ranks with fast
NICs run ahead, and their later messages share wires with what slow ranks still wait for. Wires are
shared fairly (max-min). Sizes are elements, rates elements per second; latencies are not counted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

_DONE = 1e-9  # of a transfer: what rounding leaves over


@dataclass(slots=True)
class Flow:
    """One transfer: from whom to whom, how much, and over which wires."""

    source: int
    target: int
    size: float
    wires: tuple[Hashable, ...]
    left: float = 0.0


def makespan(rounds: Sequence[Sequence[Flow]], capacity: Mapping[Hashable, float]) -> float:
    """Return when the last transfer is over."""
    turns = _Turns(rounds)
    active = list(turns.start())
    now = 0.0
    while active:
        rates = _fair(active, capacity)
        step = min(flow.left / rate for flow, rate in zip(active, rates, strict=True))
        now += step
        still: list[Flow] = []
        over: list[Flow] = []
        for flow, rate in zip(active, rates, strict=True):
            flow.left -= rate * step
            (over if flow.left <= _DONE * flow.size else still).append(flow)
        active = still + list(turns.finish(over))
    return now


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
            yield from self._enter(rank)

    def _enter(self, rank: int) -> Iterable[Flow]:
        return self._queues[rank][0][1] if self._queues[rank] else ()

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
            while queue and not self._open[rank, queue[0][0]]:
                queue.pop(0)
                yield from self._enter(rank)


def _fair(flows: Sequence[Flow], capacity: Mapping[Hashable, float]) -> list[float]:
    """Return the max-min fair rate of every transfer."""
    left = dict(capacity)
    users: dict[Hashable, set[int]] = defaultdict(set)
    for number, flow in enumerate(flows):
        for wire in flow.wires:
            users[wire].add(number)
    rates = [0.0] * len(flows)
    while users:
        wire, share = min(
            ((wire, left[wire] / len(user_flows)) for wire, user_flows in users.items()),
            key=lambda one: one[1],
        )
        for number in list(users[wire]):
            rates[number] = share
            for other in flows[number].wires:
                left[other] -= share
                users[other].discard(number)
                if not users[other]:
                    del users[other]
    return rates
