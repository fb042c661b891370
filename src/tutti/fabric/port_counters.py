"""What the sending port of a link counts, and how it changed between two readings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PAUSE_QUANTA_BITS = 65535 * 512  # how long one pause frame stops a port at most, in bits


@dataclass(frozen=True, slots=True, kw_only=True)
class PortCounters:
    """Counted since the port came up; `paused_s` is how long the far end has stopped it."""

    rate: float  # bytes per second
    sent_bytes: float = 0.0
    paused_s: float | None = None  # None: only frames are counted
    pause_frames: float = 0.0  # that came from the far end
    marks: float = 0.0  # packets marked for congestion (ECN)
    discards: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PortChange:
    """What a link did in a stretch of time, as shares of it."""

    source: str
    target: str
    paused: float
    used: float  # of its rate
    marks: float = 0.0  # per second
    discards: float = 0.0

    @property
    def name(self) -> str:
        """The link's name."""
        return f"{self.source} → {self.target}"


Link = tuple[str, str]
Reading = Mapping[Link, PortCounters]


def changes(before: Reading, after: Reading, seconds: float) -> tuple[list[PortChange], list[str]]:
    """Return what links did between two readings, and those whose counters ran backwards.

    A counter runs backwards when its device was started anew or it ran over; what happened in
    between is not known. Where no time is counted, every pause frame stands for the longest that it
    may stop a port.
    """
    if seconds <= 0:
        return [], [f"{a} → {b}" for a, b in after]
    rises, reset = [], []
    for link, now in after.items():
        old = before.get(link)
        if old is None:
            continue
        sent, frames = now.sent_bytes - old.sent_bytes, now.pause_frames - old.pause_frames
        marks, discards = now.marks - old.marks, now.discards - old.discards
        if now.paused_s is None or old.paused_s is None:
            paused = frames * PAUSE_QUANTA_BITS / 8 / now.rate
        else:
            paused = now.paused_s - old.paused_s
        if min(sent, frames, marks, discards, paused) < 0:
            reset.append(f"{link[0]} → {link[1]}")
            continue
        rises.append(
            PortChange(
                source=link[0],
                target=link[1],
                paused=min(1.0, paused / seconds),
                used=min(1.0, sent / seconds / now.rate),
                marks=marks / seconds,
                discards=discards / seconds,
            )
        )
    return rises, reset
