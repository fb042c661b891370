"""Probe agent: one per host. It probes every path to its peers and says what it received.

Ten times a second it sends some packets and reads what has come; twice a second it reports. It
judges nothing: the sender says what it sent, the receiver what came, and whoever collects both can
tell on which way of a path something was lost.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from tutti.observe.figures import key
from tutti.observe.network.path_search import PathSearch
from tutti.observe.network.probe_file import ProbeFile
from tutti.observe.network.probe_packets import (
    TIME_EXCEEDED,
    TRAIN_BYTES,
    TRAIN_PACKETS,
    UNREACHABLE,
    Arrival,
    ProbeKind,
    Receiving,
    Sending,
    pack,
    train,
)

Report = dict[str, Any]
TICK_S = 0.1
_TICKS_PER_REPORT = 5
_REPORTS_PER_ROUTES = 10
_PROBES_PER_S = 2  # over every path
_TRAINS_PER_S = 2  # of the host, over one path after another
_TRACES = 30  # per tick, at most
_FIRST_PORTS = 2  # probed before paths are known
_STALL_S = 0.5
_LATE_S = 0.25  # between ticks: an agent that runs so late says so
_SILENT_S = 1.5  # without a probe of a peer: its kernel is asked
_TAIL = TRAIN_PACKETS * 2 // 3  # from here on a train is as fast as the slowest link


class _Train:
    """Arrivals of one train."""

    __slots__ = ("began_ns", "times")

    def __init__(self, began_ns: int) -> None:
        self.began_ns = began_ns
        self.times: dict[int, int] = {}

    def rate(self) -> float | None:
        """Return bytes per second of its last third; None: too few of them came."""
        tail = sorted((n, t) for n, t in self.times.items() if n >= _TAIL)
        if len(tail) < 4 or tail[-1][1] <= tail[0][1]:
            return None
        return (len(tail) - 1) * TRAIN_BYTES * 1e9 / (tail[-1][1] - tail[0][1])


class ProbeAgent:
    """What one host sends, receives and reports; a sampler, too."""

    def __init__(self, file: ProbeFile, host: str, report: Callable[[Report], None]) -> None:
        self._host, self._file, self._report = host, file, report
        self._own = file.number(host)
        self._names, self._addresses = list(file.hosts), list(file.hosts.values())
        self._number = {address: n for n, address in enumerate(self._addresses)}
        self._peers = file.peers_of(host)
        own = self._addresses[self._own]
        self._receiving = Receiving(own, file.port)
        ports = range(file.port + 1, file.port + 1 + file.ports)
        self._sending = {port: Sending(own, port) for port in ports}
        self._knock_port = file.port + 1 + file.ports
        now = time.monotonic()
        self._search = PathSearch(self._peers, ports, now)
        self._sent: dict[tuple[int, int], int] = {}
        self._turn: list[tuple[int, int]] = []  # paths, in the order in which they are probed
        self._stations: list[tuple[int, int]] = []  # paths that trains have not taken yet
        self._trains: dict[tuple[int, int, int], _Train] = {}
        self._asked: dict[int, float] = {}  # ports whose errors are due, until when
        self._heard = dict.fromkeys(self._peers, now)
        self._ticks = self._at = self._reports = self._train_at = 0
        self._overflowed, self._ticked, self._unsure_until = 0, now, now
        self._values: dict[str, float] = {}
        self._clear()

    def _clear(self) -> None:
        self._got: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self._measured: list[tuple[int, int, float, int]] = []
        self._answered: set[int] = set()
        self._lost_room = self._late = False

    def run(self, stop: Callable[[], bool]) -> None:
        """Probe until told to stop."""
        due = time.monotonic()
        while not stop():
            self.tick(time.monotonic())
            due = max(due + TICK_S, time.monotonic() - TICK_S)  # what was missed is not made up for
            time.sleep(max(0.0, due - time.monotonic()))

    def tick(self, now: float) -> None:
        """Read what came, send what is due, report where it is time."""
        if now - self._ticked > _STALL_S:  # while we slept the kernel may have run out of room
            self._unsure_until = now + _STALL_S + 1.0
        self._late |= now - self._ticked > _LATE_S
        self._ticked = now
        self._read(now)
        self._trace(now)
        self._probe()
        self._ticks += 1
        if not self._ticks % int(1 / TICK_S):
            self._knock(now)
        if not self._ticks % _TICKS_PER_REPORT:
            self._search.trace_again()
            self._tell()

    def sample(self) -> dict[str, float]:
        """Return what the probes say, peer by peer, as any sampler does."""
        return dict(self._values)

    def close(self) -> None:
        """Close all sockets."""
        self._receiving.close()
        for one in self._sending.values():
            one.close()

    def _read(self, now: float) -> None:
        for arrival in self._receiving.arrivals():
            source = self._number.get(arrival.address)
            if source is None or source != arrival.probe.source:
                continue
            if arrival.overflowed != self._overflowed:
                self._overflowed, self._lost_room = arrival.overflowed, True
            if arrival.probe.kind == ProbeKind.PROBE:
                self._take_probe(source, arrival, now)
            elif arrival.probe.kind == ProbeKind.TRAIN:
                self._take_train(source, arrival)
        for port, until in list(self._asked.items()):
            for complaint in self._sending[port].complaints():
                peer = self._number.get(complaint.target)
                if peer is None:
                    continue
                kind, icmp = complaint.probe.kind, complaint.icmp
                if kind == ProbeKind.TRACE and icmp == TIME_EXCEEDED:
                    self._search.answer(peer, port, complaint.probe.number, complaint.by)
                elif (
                    kind == ProbeKind.KNOCK
                    and icmp == UNREACHABLE
                    and complaint.by == complaint.target
                ):
                    self._answered.add(peer)
            if now > until:
                del self._asked[port]

    def _take_probe(self, source: int, arrival: Arrival, now: float) -> None:
        probe = arrival.probe
        if source in self._heard:
            self._heard[source] = now
        self._search.length(source, arrival.hops)
        delay_us = (arrival.at_ns - probe.sent_ns) // 1000
        self._got.setdefault((source, arrival.port), []).append((probe.sequence, delay_us))

    def _take_train(self, source: int, arrival: Arrival) -> None:
        probe = arrival.probe
        at = (source, arrival.port, probe.sequence)
        one = self._trains.get(at)
        if one is None:
            if len(self._trains) > 64:  # what never became whole
                self._trains.clear()
            one = self._trains[at] = _Train(arrival.at_ns - probe.sent_ns)
        one.times[probe.number] = arrival.at_ns
        if probe.number == TRAIN_PACKETS - 1:
            del self._trains[at]
            rate = one.rate()
            if rate is not None:
                self._measured.append((source, arrival.port, rate, one.began_ns // 1000))

    def _trace(self, now: float) -> None:
        for peer, port, hops in self._search.due(now, _TRACES):
            data = pack(ProbeKind.TRACE, hops, self._own, 0)
            self._sending[port].send(data, (self._addresses[peer], self._file.port), hops)
            self._asked[port] = now + 1.0

    def _probe(self) -> None:
        """Send this tick's part of the probes, and a train where it is time."""
        if not self._turn or self._at >= len(self._turn):
            self._at, self._turn = 0, [
                (peer, port)
                for peer in self._peers
                for port in (self._search.paths[peer] or list(self._sending)[:_FIRST_PORTS])
            ]  # fmt: skip
        slices = round(1 / (_PROBES_PER_S * TICK_S))
        count = -(-len(self._turn) // slices)
        for peer, port in self._turn[self._at : self._at + count]:
            sequence = self._sent.get((peer, port), -1) + 1
            data = pack(ProbeKind.PROBE, 0, self._own, sequence)
            if self._sending[port].send(data, (self._addresses[peer], self._file.port)):
                self._sent[peer, port] = sequence
        self._at += count
        every = round(1 / (_TRAINS_PER_S * TICK_S))
        if (self._ticks + self._own) % every == 0 and self._search.is_done(self._peers[-1]):
            self._send_train()

    def _send_train(self) -> None:
        """Send a train over the next path, in an order of the host's own: trains seldom meet."""
        if not self._stations:
            self._stations = [(p, port) for p in self._peers for port in self._search.paths[p]]
            random.Random(self._own).shuffle(self._stations)
        if self._stations:
            self._train_at += 1
            peer, port = self._stations.pop()
            data = train(self._own, self._train_at)
            self._sending[port].send_train(data, (self._addresses[peer], self._file.port))

    def _knock(self, now: float) -> None:
        """Ask the kernels of peers that have gone silent."""
        port = next(iter(self._sending))
        for peer, heard in self._heard.items():
            if now - heard > _SILENT_S:
                data = pack(ProbeKind.KNOCK, 0, self._own, 0)
                self._sending[port].send(data, (self._addresses[peer], self._knock_port))
                self._asked[port] = now + 1.0

    def _tell(self) -> None:
        got, delays = [], []
        for (source, port), came in self._got.items():
            first = min(sequence for sequence, _ in came)
            mask = 0
            for sequence, _ in came:
                mask |= 1 << min(sequence - first, 1024)
            got.append([source, port, first, mask])
            middle = int(statistics.median(d for _, d in came))
            delays.append([source, port, middle])
            name = self._names[source]
            received = key("probes_received_total", name)
            self._values[received] = self._values.get(received, 0.0) + len(came)
            self._values[key("probe_delay_seconds", name)] = middle / 1e6
        for source, _, rate, _ in self._measured:
            self._values[key("probe_rate_bytes", self._names[source])] = rate
        now, news = time.monotonic(), self._search.news
        if self._reports % _REPORTS_PER_ROUTES == 0:  # whoever collects may have come later
            news = [
                (p, port, h) for p, own in self._search.paths.items() for port, h in own.items()
            ]
        self._reports += 1
        self._report({
            "host": self._host,
            "number": self._reports,
            "sent": [[peer, port, last] for (peer, port), last in self._sent.items()],
            "got": got,
            "delays_us": delays,
            "trains": [list(one) for one in self._measured],
            "paths": [[peer, port, list(hops)] for peer, port, hops in news],
            "read_at": self._ticked,
            "late": self._late,
            "overflowed": self._lost_room or now < self._unsure_until,
            "silent": [p for p, heard in self._heard.items() if now - heard > _SILENT_S],
            "answered": sorted(self._answered),
        })  # fmt: skip
        self._search.news.clear()
        self._clear()
