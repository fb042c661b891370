"""Pauses: storms, congestion and circular waits, from what ports counted. Pure.

A paused link waits for the switch or host at its far end, and that for its own links that are
paused or full. Followed on, every wait ends at its origin: a host that stops its switch though its
link is not used (a storm, or a host too slow for its NIC), or a link that is full (congestion:
incast, or too few links). Where waits lead back to where they came from and nothing moves, it is a
circular wait, for which there is no end but a reset.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tutti.fabric.deadlock import find_cycle
from tutti.fabric.port_counters import PortChange

PAUSED = 0.1  # of the time: below, pauses are what bursts cause
_STUCK, _IDLE = 0.95, 0.01
_FULL = 0.8
_ASKED = 0.5  # a link as much paused or used is what others wait for

PauseKind = Literal["circular wait", "storm", "congestion"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseFinding:
    """One origin of pauses, and the links that stand still because of it."""

    kind: PauseKind
    origin: tuple[str, ...]  # links; of a circular wait each waits for the next
    victims: tuple[str, ...] = ()

    def words(self) -> str:
        """Return it as a person would say it."""
        if self.kind == "circular wait":
            return f"circular wait: {' waits for '.join((*self.origin, self.origin[0]))}"
        waiting = f"; {len(self.victims)} links wait for it" if self.victims else ""
        if self.kind == "storm":
            source, _, host = self.origin[0].partition(" → ")
            return f"storm: {host} stops {source} and does not take what comes{waiting}"
        return f"congestion: {self.origin[0]} is full{waiting}"


def find_pauses(ports: Sequence[PortChange], hosts: Collection[str] = ()) -> list[PauseFinding]:
    """Return the origins of pauses; none: pauses, if any, are what short bursts cause.

    `hosts` are the nodes that forward nothing; by default those that no link but one leaves.
    """
    out: dict[str, list[PortChange]] = defaultdict(list)
    for port in ports:
        out[port.source].append(port)
    ends = set(hosts) or {port.target for port in ports if len(out[port.target]) <= 1}
    waits = {
        port.name: [
            other.name
            for other in out[port.target]
            if port.target not in ends
            and other.target != port.source
            and other.paused + other.used >= _ASKED
        ]
        for port in ports
        if port.paused >= PAUSED
    }
    by_name = {port.name: port for port in ports}
    storms = {
        name for name in waits
        if by_name[name].target in ends and by_name[name].used < _FULL
    }  # fmt: skip
    findings = [
        PauseFinding(kind="storm", origin=(name,), victims=_behind({name}, waits))
        for name in sorted(storms)
    ]
    excused = storms.union(*(one.victims for one in findings)) if findings else set()
    stuck = {
        name: [n for n in ways if by_name[n].paused >= _STUCK and by_name[n].used < _IDLE]
        for name, ways in waits.items()
        if by_name[name].paused >= _STUCK and by_name[name].used < _IDLE and name not in excused
    }
    circle = _circle(stuck)
    if circle:
        behind = _behind(set(circle), waits)
        findings.append(PauseFinding(kind="circular wait", origin=tuple(circle), victims=behind))
        excused |= {*circle, *behind}
    full = {
        name for ways in waits.values() for name in ways
        if by_name[name].paused < PAUSED and by_name[name].used >= _FULL
    }  # fmt: skip
    for name in sorted(full):
        behind = tuple(n for n in _behind({name}, waits) if n not in excused)
        if behind:
            findings.append(PauseFinding(kind="congestion", origin=(name,), victims=behind))
    return findings


def _behind(origins: set[str], waits: dict[str, list[str]]) -> tuple[str, ...]:
    """Return the links that wait for these, directly or not."""
    waiting = set(origins)
    while True:
        more = {name for name, ways in waits.items() if waiting.intersection(ways)} - waiting
        if not more:
            return tuple(sorted(waiting - origins))
        waiting |= more


def _circle(waits: dict[str, list[str]]) -> list[str]:
    """Return links of which each waits for the next and the last for the first; none: empty."""
    names = sorted({*waits, *(way for ways in waits.values() for way in ways)})
    number = {name: i for i, name in enumerate(names)}
    edges = [(number[name], number[way]) for name, ways in waits.items() for way in ways]
    cycle = find_cycle(np.array(edges, dtype=np.int64).reshape(-1, 2).T, len(names))
    return [names[i] for i in cycle]
