"""TCP flows on a Clos bed: random sets of connections, measured against max-min shares.

One process opens the sockets of all hosts, each in its host's namespace, and moves bytes over them
as fast as they go. What every connection received between two moments is held against what the
flow model says of the same paths.
"""

from __future__ import annotations

import contextlib
import random
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tutti.bench.beds.clos_bed import ClosBed
from tutti.bench.beds.namespaces import visiting
from tutti.fabric.shares import fair_rates
from tutti.fabric.wiring import Floats

_PIECE = b"\0" * 65536
SENDERS = b"reno"  # that halve what is under way when a packet is lost: fair among equals
PAYLOAD = 1448 / 1514  # of a frame's bytes


@dataclass(frozen=True, slots=True)
class Connection:
    """Who sends to whom, from which port, to which."""

    source: int
    target: int
    ports: tuple[int, int]


@dataclass(slots=True)
class SetResult:
    """One set of flows: bytes per second of each connection, predicted and measured."""

    connections: list[Connection]
    predicted: Floats
    measured: Floats = field(default_factory=lambda: np.zeros(0))

    @property
    def mean_error(self) -> float:
        """The connections' errors, on average."""
        return float(np.abs(self.measured / self.predicted - 1.0).mean())

    @property
    def slowest_error(self) -> float:
        """The error of the slowest connection's rate."""
        return float(abs(self.measured.min() / self.predicted.min() - 1.0))


def random_set(bed: ClosBed, seed: int) -> list[Connection]:
    """Return connections between random pairs of hosts on different leaves, 1 to 4 per pair."""
    dice, spec = random.Random(seed), bed.spec
    hosts = list(range(spec.hosts))
    each = dice.randint(1, 4)
    connections: list[Connection] = []
    receivers = dice.sample(hosts, len(hosts))
    for source, target in zip(hosts, receivers, strict=True):
        if source // spec.hosts_per_leaf != target // spec.hosts_per_leaf:
            connections += [
                Connection(source, target, (dice.randint(20000, 60000), 5000 + target))
                for _ in range(each)
            ]
    return list({c.ports[0]: c for c in connections}.values())  # source ports tell them apart


def predicted_rates(bed: ClosBed, connections: Sequence[Connection]) -> Floats:
    """Return what each connection should receive: a fair share of the links on its path."""
    paths = np.array([
        bed.links(c.source, c.target, bed.way(c.source, c.target, c.ports)) for c in connections
    ], dtype=np.int32)  # fmt: skip
    return fair_rates(paths, bed.wiring.rates) * PAYLOAD


class FlowSockets:
    """All ends of a set of connections, in one loop."""

    def __init__(self, bed: ClosBed, connections: Sequence[Connection]) -> None:
        self._stack = contextlib.ExitStack()
        self._loop = self._stack.enter_context(selectors.DefaultSelector())
        self.received = np.zeros(len(connections))
        try:
            self._open(bed, connections)
        except BaseException:
            self.close()
            raise

    def _open(self, bed: ClosBed, connections: Sequence[Connection]) -> None:
        spec = bed.spec
        listeners: dict[int, socket.socket] = {}
        for target in {c.target for c in connections}:
            with visiting(bed.host(target)):
                made = self._stack.enter_context(socket.socket())
            made.bind((spec.address(target), 5000 + target))
            made.listen(256)
            made.settimeout(5.0)
            listeners[target] = made
        for number, one in enumerate(connections):
            with visiting(bed.host(one.source)):
                sender = self._stack.enter_context(socket.socket())
            sender.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, SENDERS)
            sender.bind((spec.address(one.source), one.ports[0]))
            sender.settimeout(5.0)
            sender.connect((spec.address(one.target), one.ports[1]))
            receiver, _ = listeners[one.target].accept()
            self._stack.enter_context(receiver)
            for end in (sender, receiver):
                end.setblocking(False)
            self._loop.register(sender, selectors.EVENT_WRITE, -1)
            self._loop.register(receiver, selectors.EVENT_READ, number)

    def move(self, seconds: float) -> float:
        """Send and receive for a while; return how long it was."""
        started = time.monotonic()
        while (now := time.monotonic()) < started + seconds:
            for key, _ in self._loop.select(max(0.0, started + seconds - now)):
                end = key.fileobj
                assert isinstance(end, socket.socket)
                with contextlib.suppress(BlockingIOError):
                    if key.data < 0:
                        end.send(_PIECE)
                    else:
                        self.received[key.data] += len(end.recv(1 << 18))
        return now - started

    def close(self) -> None:
        """Close every socket."""
        self._stack.close()


def run_set(
    bed: ClosBed, connections: Sequence[Connection], *, settle_s: float = 2.0, seconds: float = 6.0
) -> SetResult:
    """Predict a set of connections, run it, and return both."""
    result = SetResult(list(connections), predicted_rates(bed, connections))
    bed.share([one.ports[0] for one in connections])
    sockets = FlowSockets(bed, connections)
    try:
        sockets.move(settle_s)
        before = sockets.received.copy()
        lasted = sockets.move(seconds)
        result.measured = (sockets.received - before) / lasted
    finally:
        sockets.close()
    return result
