"""Hosts whose clocks are apart: rings of all hosts laid on one clock. Pure.

All ranks begin a step within about a step of each other, because each needs the others for the one
before. So what lies between two hosts' begins of the same steps, beyond that, is their clocks.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from tutti.observe.ring import Kind, RingReading

_LEAST_S = 2.0  # less is no matter: nothing is judged by it


def on_one_clock(rings: Sequence[RingReading], own: str) -> tuple[list[RingReading], list[str]]:
    """Return rings by the clock of the host `own`, or of the first ring's; and what was wrong."""
    hosts = dict.fromkeys(ring.host for ring in rings)
    if len(hosts) < 2:
        return list(rings), []
    reference = own if own in hosts else rings[0].host
    begun = {host: _begins([ring for ring in rings if ring.host == host]) for host in hosts}
    ahead: dict[str, float] = {}
    for host, begins in begun.items():
        both = sorted(begins.keys() & begun[reference].keys())
        if not both:
            continue
        apart = statistics.median(begins[step] - begun[reference][step] for step in both)
        if abs(apart) > max(_LEAST_S, 2 * _step_s(begun[reference])):
            ahead[host] = apart
    notes = [
        f"the clock of {host} is {abs(apart):,.0f} s {'ahead of' if apart > 0 else 'behind'} that "
        f"of {reference}; its events were moved by that"
        for host, apart in ahead.items()
    ]
    moved = [
        replace(ring, clock_ns=ring.clock_ns - round(1e9 * ahead.get(ring.host, 0.0)))
        for ring in rings
    ]
    return moved, notes


def _begins(rings: Sequence[RingReading]) -> dict[int, float]:
    """Return when a host's first rank began each step, on its own wall clock."""
    begins: dict[int, float] = {}
    for ring in rings:
        for event in ring.events:
            if event.kind is Kind.STEP:
                at = (event.time_ns + ring.clock_ns) / 1e9
                begins[event.step] = min(at, begins.get(event.step, at))
    return begins


def _step_s(begins: dict[int, float]) -> float:
    gaps = [begins[step + 1] - begins[step] for step in begins if step + 1 in begins]
    return statistics.median(gaps) if gaps else 0.0
