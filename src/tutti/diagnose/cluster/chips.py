"""Round 0: every chip alone, held against its own Profile and its twins. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tutti.diagnose.slow import APART, slower_than_twins

AGAINST_PROFILE = 1.15  # times as long as its own Profile says
TWINS = 3  # of so many of a kind one can be told to be slow
WRONG = "multiplies wrongly"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipReading:
    """What one chip took for what its Profile has; seconds by what was done."""

    name: str  # "host/chip 0"
    kind: str  # chips of one kind are twins
    seconds: Mapping[str, float]
    expected: Mapping[str, float]  # of its Profile; what it lacks is not there
    wrong: str = ""  # a product that came out wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowChip:
    """A chip that takes longer than it should."""

    name: str
    factor: float
    part: str  # what of it is slow most
    against: str  # its Profile, or its twins


def slow_chips(readings: Sequence[ChipReading]) -> list[SlowChip]:
    """Return the chips that are slow against their own Profile or, where it lacks them, twins.

    A Profile may be of another driver: what all twins show alike is taken out, where there are
    three or more of a kind.
    """
    slow: dict[str, SlowChip] = {}
    kinds: dict[str, list[ChipReading]] = {}
    for reading in readings:
        kinds.setdefault(reading.kind, []).append(reading)
    for twins in kinds.values():
        for part in dict.fromkeys(name for own in twins for name in own.seconds):
            for name, factor, against in _of_part(twins, part):
                known = slow.get(name)
                if known is None or known.factor < factor:
                    slow[name] = SlowChip(name=name, factor=factor, part=part, against=against)
    return sorted(slow.values(), key=lambda chip: -chip.factor)


def _of_part(twins: Sequence[ChipReading], part: str) -> list[tuple[str, float, str]]:
    ratios = {
        own.name: own.seconds[part] / own.expected.get(part, 1.0)
        for own in twins
        if part in own.seconds
    }
    apart = slower_than_twins(ratios, bar=APART)
    if apart or len(ratios) >= TWINS:
        return [(name, factor, "its twins") for name, factor in apart.items()]
    return [
        (own.name, ratios[own.name], "its Profile")
        for own in twins
        if part in own.seconds and part in own.expected and ratios[own.name] > AGAINST_PROFILE
    ]


def all_alike(readings: Sequence[ChipReading]) -> dict[str, float]:
    """Return kinds whose chips, three or more, all take longer than their Profile, and by what."""
    factors: dict[str, float] = {}
    for kind in dict.fromkeys(own.kind for own in readings):
        twins = [own for own in readings if own.kind == kind]
        ratios = [
            statistics.median(own.seconds[p] / own.expected[p] for p in shared)
            for own in twins
            if (shared := [p for p in own.seconds if p in own.expected])
        ]
        if len(ratios) >= TWINS and statistics.median(ratios) > AGAINST_PROFILE:
            factors[kind] = statistics.median(ratios)
    return factors


def incomparable(readings: Sequence[ChipReading]) -> list[str]:
    """Return the chips that neither a Profile nor two twins say anything about."""
    counts = Counter(own.kind for own in readings)
    return [own.name for own in readings if not own.expected and counts[own.kind] < TWINS]
