"""Probes between the hosts of a run that talk to each other: once a second over every NIC.

A host answers its neighbours' packets, and sends its own. How long one was on its way there and
back is told by the kernel's own stamps at both ends, less the time that it lay at the neighbour: a
host that is busy looks no further away. Of a neighbour that never answered (a firewall, a port that
somebody else has) nothing is said but that, once.
"""

from __future__ import annotations

import contextlib
import math
import select
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tutti.errors import InputError
from tutti.observe.figures import key
from tutti.observe.network.probe_packets import Arrival, ProbeKind, Receiving, answer, pack
from tutti.observe.samplers.sampler import Say, Values

EVERY_S = 1.0
LATE_S = 1.0  # after which a packet is lost
RECENT = 30  # packets whose share of losses is told
_FIRST = 10  # of them, before a share is
_PATIENCE = 30  # packets after which one that never answered is named
_MOST_PEERS = 8
_WAIT_S = 0.2


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A host to be probed: its name, where it answers on each NIC, and where we do."""

    name: str
    addresses: tuple[str, ...]
    port: int


@dataclass(slots=True)
class _Way:
    """A NIC of ours to a NIC of a neighbour."""

    label: str
    socket: Receiving
    to: tuple[str, int]
    sent: dict[int, float]  # sequence → when, of those that may still be answered
    told: deque[bool]  # of the newest, whether they were lost
    sequence: int = 0
    round_trip_s: float = math.nan
    answered: bool = False
    said: bool = False


class NeighbourProbes:
    """A sampler of round trips and losses to neighbours."""

    def __init__(
        self,
        own: Sequence[str],
        port: int,
        neighbours: Sequence[Neighbour],
        say: Say = lambda _: None,
        *,
        every_s: float = EVERY_S,
    ) -> None:
        """Listen at a port of own addresses, one per NIC, and probe neighbours from there."""
        self._every, self._say = every_s, say
        self._sockets: list[Receiving] = []
        self._ways: list[_Way] = []
        self._known = {address for one in neighbours for address in one.addresses}
        self._lock, self._stop = threading.Lock(), threading.Event()
        for address in own:
            try:
                self._sockets.append(Receiving(address, port))
            except (InputError, OSError) as error:
                self.close()
                raise InputError(f"neighbours are not probed ({error})") from None
        for neighbour in neighbours[:_MOST_PEERS]:
            self._ways += self._to(neighbour)
        self._by_number = dict(enumerate(self._ways))
        self._thread = threading.Thread(target=self._run, name="neighbours", daemon=True)
        self._thread.start()

    def _to(self, one: Neighbour) -> list[_Way]:
        pairs = list(zip(self._sockets, one.addresses, strict=False))
        return [
            _Way(
                label=one.name if len(pairs) == 1 else f"{one.name} nic {nic}",
                socket=socket, to=(address, one.port), sent={}, told=deque(maxlen=RECENT),
            )
            for nic, (socket, address) in enumerate(pairs)
        ]  # fmt: skip

    def sample(self) -> Values:
        """Return what is known of every way that was ever answered."""
        values: Values = {}
        with self._lock:
            for way in self._ways:
                if way.answered:
                    values[key("neighbour_round_trip_seconds", way.label)] = way.round_trip_s
                    loss = sum(way.told) / len(way.told) if len(way.told) >= _FIRST else math.nan
                    values[key("neighbour_loss_ratio", way.label)] = loss
        return values

    def close(self) -> None:
        """Probe and answer no more."""
        self._stop.set()
        with contextlib.suppress(AttributeError):  # it failed before there was one
            self._thread.join(timeout=2 * self._every + 1.0)
        for socket in self._sockets:
            socket.close()
        self._sockets.clear()

    def _run(self) -> None:
        due = time.monotonic()
        try:
            while not self._stop.is_set():
                now = time.monotonic()
                if now >= due:
                    self._send(now)
                    due = max(due + self._every, now)  # what was missed is not made up for
                wait = min(_WAIT_S, max(0.0, due - now))
                ready, _, _ = select.select(self._sockets, [], [], wait)
                for socket in ready:
                    for arrival in socket.arrivals():
                        self._take(socket, arrival)
        except (OSError, ValueError) as error:  # the interface is gone, or the sockets closed
            if not self._stop.is_set():
                self._say(f"neighbours are probed no longer ({error})")

    def _send(self, now: float) -> None:
        silent: list[str] = []
        with self._lock:
            for number, way in self._by_number.items():
                for sequence in [s for s, at in way.sent.items() if now - at > LATE_S]:
                    del way.sent[sequence]
                    if way.answered:
                        way.told.append(True)
                if not way.answered and not way.said and way.sequence >= _PATIENCE:
                    way.said = True
                    silent.append(way.label)
                data = pack(ProbeKind.ECHO, 0, number, way.sequence)
                way.sent[way.sequence] = now
                way.socket.send(data, way.to)
                way.sequence += 1
        if silent:
            names = ", ".join(silent)
            self._say(f"{names}: no answer to probes at port {self._ways[0].to[1]} (UDP)")

    def _take(self, socket: Receiving, arrival: Arrival) -> None:
        probe = arrival.probe
        if arrival.address not in self._known:
            return
        if probe.kind == ProbeKind.ECHO:
            held_ns = time.time_ns() - arrival.at_ns
            socket.send(answer(probe, held_ns), (arrival.address, arrival.port))
        elif probe.kind == ProbeKind.ANSWER:
            way = self._by_number.get(probe.source)
            if way is None or way.to[0] != arrival.address:
                return
            with self._lock:
                if way.sent.pop(probe.sequence, None) is None:
                    return  # too late, or twice
                way.answered = True
                way.told.append(False)
                way.round_trip_s = max(0, arrival.at_ns - probe.sent_ns) / 1e9
