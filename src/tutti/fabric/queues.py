"""Queues: a small network step by step, with marks (ECN, DCQCN) and pauses (PFC).

Up to 1,024 links. The flow model says who shares what in the long run and knows no queues; here
bytes wait for links, a full switch stops the links that feed it, and whoever stands behind a
stopped link waits, too. Host NICs are links, and so is what a host takes out of its NIC: a host
that is slow there stops its switch. Bytes are a fluid: of what waits for one link every flow moves
in proportion. Senders slow down by DCQCN's timer alone, its byte counter is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tutti.errors import InputError, hint
from tutti.fabric.port_counters import PortCounters

MOST_LINKS = 1024
HostLink = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRules:
    """Thresholds in bytes: of what a switch holds of one incoming link, and of a queue's length."""

    step_s: float = 1e-6
    pfc: bool = True
    xoff: float = 250e3
    xon: float = 225e3
    pause_delay_s: float = 2e-6
    dcqcn: bool = True
    ecn_low: float = 50e3
    ecn_high: float = 200e3
    ecn_most: float = 0.2  # chance of a mark just below ecn_high
    room: float = 1e6  # of an incoming link without pauses; what is more is lost

    def __post_init__(self) -> None:
        if not 0 < self.xon <= self.xoff:
            raise InputError(f"xon {self.xon:g}, xoff {self.xoff:g}: 0 < xon ≤ xoff is needed")
        if not 0 <= self.ecn_low < self.ecn_high:
            raise InputError(
                f"ecn_low {self.ecn_low:g}, ecn_high {self.ecn_high:g}: the first must be less"
            )
        if self.step_s <= 0 or self.pause_delay_s < 0:
            raise InputError("step_s must be more than 0, pause_delay_s at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueFlow:
    """What one host sends another over given switches, at a rate that DCQCN may lower."""

    path: tuple[str, ...]  # nodes, from a host to a host
    start_s: float = 0.0
    stop_s: float = np.inf
    rate: float = np.inf  # bytes per second, at most its NIC's


class QueueNetwork:
    """A network that time passes in; what is changed holds from the next `run` on."""

    def __init__(
        self,
        links: dict[HostLink, float],
        flows: Sequence[QueueFlow],
        rules: QueueRules | None = None,
    ) -> None:
        self.rules = rules or QueueRules()
        ends = {flow.path[-1] for flow in flows}
        drains = {(end, "") for end in sorted(ends)}  # what a host takes out of its NIC
        into = {b: rate for (a, b), rate in links.items()}
        self._names = [*links, *sorted(drains)]
        if len(self._names) > MOST_LINKS:
            raise InputError(
                f"{len(self._names):,} links; the queue model takes {MOST_LINKS:,} at most: "
                "simulate a part of the network"
            )
        self._ports = len(links)
        self._number = {link: i for i, link in enumerate(self._names)}
        self._rates = np.array(
            [links[link] if link in links else 2.0 * into.get(link[0], 0.0) for link in self._names]
        )
        if (self._rates <= 0).any():
            slow = self._names[int(np.argmax(self._rates <= 0))]
            raise InputError(f"link {slow[0]} → {slow[1] or 'memory'} has no rate above 0")
        self.flows = list(flows)
        entries = [self._entries(flow) for flow in flows]
        self._offsets = np.cumsum([0, *map(len, entries)])
        self._links = np.array([link for own in entries for link in own], dtype=np.int64)
        self._bytes = np.zeros(len(self._links))
        first = self._links[self._offsets[:-1]] if flows else np.zeros(0, dtype=np.int64)
        line = np.minimum(self._rates[first], [flow.rate for flow in flows])
        none = np.zeros(len(flows))
        self._per_flow = (line.copy(), line.copy(), none + 1.0, line, none.copy(), none.copy())
        self._per_link = tuple(np.zeros(len(self._names)) for _ in range(5))
        delay = max(1, round(self.rules.pause_delay_s / self.rules.step_s))
        self._history = np.zeros((delay, len(self._names)), dtype=np.int64)
        self._calm = np.zeros(len(flows), dtype=np.int64)
        self._forced = np.zeros(len(self._names), dtype=np.int64)
        self._steps = 0

    def _entries(self, flow: QueueFlow) -> list[int]:
        if len(flow.path) < 2:
            raise InputError(f"a flow's path {flow.path} has fewer than two nodes")
        steps = [*zip(flow.path[:-1], flow.path[1:], strict=True), (flow.path[-1], "")]
        for link in steps:
            if link not in self._number:
                raise InputError(f"a flow takes {link[0]} → {link[1]}; there is no such link")
        return [self._number[link] for link in steps]

    @property
    def now_s(self) -> float:
        """The time."""
        return self._steps * self.rules.step_s

    @property
    def delivered_bytes(self) -> list[float]:
        """What every flow has brought to its end."""
        return [float(n) for n in self._per_flow[5]]

    def take(self, host: str, rate: float) -> None:
        """Let a host take no more than this out of its NIC, in bytes per second."""
        self._rates[self._at((host, ""))] = max(rate, 1.0)

    def storm(self, source: str, host: str, *, on: bool = True) -> None:
        """Let a broken NIC stop its switch whether it has room or not."""
        self._forced[self._at((source, host))] = on

    def _at(self, link: HostLink) -> int:
        if link not in self._number:
            names = [f"{a} → {b}" for a, b in self._names]
            raise InputError(f"no link {link}; {hint(' → '.join(link), names)}")
        return self._number[link]

    def run(self, seconds: float) -> dict[HostLink, PortCounters]:
        """Let time pass; return what the ports have counted since the beginning."""
        from tutti.fabric import queue_loops
        from tutti.loops import compiled

        rules, steps = self.rules, round(seconds / self.rules.step_s)
        numbers = (
            rules.xoff, rules.xon, rules.ecn_low, rules.ecn_high, rules.ecn_most,
            float(rules.dcqcn), float(rules.pfc), rules.room,
        )  # fmt: skip
        starts = np.array([flow.start_s for flow in self.flows])
        stops = np.array([flow.stop_s for flow in self.flows])
        compiled(queue_loops.advance)(
            steps, self._steps, rules.step_s, self._ports, self._offsets, self._links,
            self._rates * rules.step_s, starts, stops, numbers, self._forced, self._bytes,
            self._per_flow, self._per_link, self._history, self._calm,
        )  # fmt: skip
        self._steps += steps
        sent, paused, frames, marks, discards = self._per_link
        return {
            link: PortCounters(
                rate=float(self._rates[i]), sent_bytes=float(sent[i]), paused_s=float(paused[i]),
                pause_frames=float(frames[i]), marks=float(marks[i]), discards=float(discards[i]),
            )
            for i, link in enumerate(self._names)
            if link[1]
        }  # fmt: skip
