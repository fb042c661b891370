"""Path search: which switches each source port leads over. Pure: times and answers in.

Switches hash a packet's addresses and ports. Packets that may take one hop, then two, then three
come back from the switch where they end; so does every source port's path become known, and of the
ports with one path the first is kept. A kept path is traced again now and then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

Hops = tuple[str, ...]
UNKNOWN = "?"  # a switch that does not answer
_PATIENCE_S = 0.3
_TRIES = 3
_MOST_HOPS = 8
_GUESS_AFTER_S = 2.0  # no probe has told by then how far a peer is


@dataclass(slots=True)
class _Trace:
    peer: int
    port: int
    hops: list[str] = field(default_factory=list)
    tries: int = 0
    sent_at: float = -1.0

    @property
    def at(self) -> int:
        """How many hops the next packet may take."""
        return len(self.hops) + 1


class PathSearch:
    """The paths from one host to its peers."""

    def __init__(self, peers: Sequence[int], ports: Sequence[int], now: float) -> None:
        self._began = now
        self._waiting = {peer: list(ports) for peer in peers}
        self._under_way: dict[tuple[int, int], _Trace] = {}
        self._length: dict[int, int] = {}
        self.paths: dict[int, dict[int, Hops]] = {peer: {} for peer in peers}
        self.news: list[tuple[int, int, Hops]] = []
        self._again = 0

    def is_done(self, peer: int) -> bool:
        """Tell whether all ports to a peer have been tried."""
        return not self._waiting[peer] and all(key[0] != peer for key in self._under_way)

    def length(self, peer: int, hops: int) -> None:
        """Note how many switches a peer's own probes have passed."""
        if 0 <= hops <= _MOST_HOPS:
            self._length[peer] = max(hops, self._length.get(peer, 0))

    def due(self, now: float, most: int) -> list[tuple[int, int, int]]:
        """Return what to send now: peer, source port, hops."""
        self._start(now, most)
        probes: list[tuple[int, int, int]] = []
        for trace in list(self._under_way.values()):
            if len(probes) == most:
                break
            if trace.sent_at >= 0 and now - trace.sent_at < _PATIENCE_S:
                continue
            if trace.tries == _TRIES:
                self._advance(trace, UNKNOWN)
                if (trace.peer, trace.port) not in self._under_way:
                    continue
            trace.tries, trace.sent_at = trace.tries + 1, now
            probes.append((trace.peer, trace.port, trace.at))
        return probes

    def answer(self, peer: int, port: int, hops: int, by: str) -> None:
        """Note which switch a packet with so many hops ended at."""
        trace = self._under_way.get((peer, port))
        if trace is not None and trace.at == hops:
            self._advance(trace, by)

    def trace_again(self) -> None:
        """Trace the next of the known paths once more: routes may have changed."""
        known = [(peer, port) for peer, ports in self.paths.items() for port in ports]
        if known:
            self._again += 1
            key = known[self._again % len(known)]
            self._under_way.setdefault(key, _Trace(*key))

    def _start(self, now: float, most: int) -> None:
        for peer, ports in self._waiting.items():
            if peer not in self._length and now - self._began < _GUESS_AFTER_S:
                continue
            while ports and len(self._under_way) < most:
                key = (peer, ports.pop(0))
                self._under_way[key] = _Trace(*key)

    def _advance(self, trace: _Trace, by: str) -> None:
        trace.hops.append(by)
        trace.tries, trace.sent_at = 0, -1.0
        known = self._length.get(trace.peer)
        silent = len(trace.hops) >= 2 and trace.hops[-2:] == [UNKNOWN, UNKNOWN]
        if known is None and (silent or len(trace.hops) == _MOST_HOPS):
            while trace.hops and trace.hops[-1] == UNKNOWN:
                trace.hops.pop()
            self._finish(trace)
        elif known is not None and len(trace.hops) >= known:
            self._finish(trace)

    def _finish(self, trace: _Trace) -> None:
        del self._under_way[trace.peer, trace.port]
        hops, known = tuple(trace.hops), self.paths[trace.peer]
        if trace.port in known:
            if hops != known[trace.port] and UNKNOWN not in hops:
                known[trace.port] = hops
                self.news.append((trace.peer, trace.port, hops))
        elif hops not in known.values():
            known[trace.port] = hops
            self.news.append((trace.peer, trace.port, hops))
