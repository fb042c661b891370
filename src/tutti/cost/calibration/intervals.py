"""How far off a prediction may be: the half-width of its 10–90 % interval, in logarithms.

Rows that no fit saw say how far constants are off inside of what calibrated them; the extrapolating
judges say how much is added outside. Squares add up: of the calibration itself, of a cluster, a
software stack or a chip that nobody measured, and of every doubling beyond the measured range.
`interval_fit` estimates the figures, `intervals.json` holds those that ship.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Annotated, NamedTuple

from tutti import document, files
from tutti.cost.calibration.shipped import Calibration
from tutti.document import AtLeast, Place

SHARE = 0.8  # of the cases that an interval holds: from 10 to 90 %
_FILE = "intervals.json"
OTHERS = "others"  # degrees and tokens, in `octave`
# Blocks by a profile that has none of their shapes are off by 0.5 to 4.7 % (docs/results.md).
MEASURED = 0.047
NARROW, EXPERTS = "fp8", "experts"  # as ranges call them

Width = Annotated[float, AtLeast(0)]


class Known(StrEnum):
    """What the runs that calibrated a pool's constants have in common with it."""

    CLUSTER = "cluster"  # they ran there
    STACK = "stack"  # the same chip and software, on other clusters
    CHIP = "chip"  # the same chip, with other software
    NOTHING = "nothing"  # there are none


class Interval(NamedTuple):
    """What 8 of 10 measurements lie within."""

    low: float
    high: float


def interval(value: float, half_width: float) -> Interval:
    """Return the interval around a predicted value."""
    return Interval(value * math.exp(-half_width), value * math.exp(half_width))


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """Half-widths by what is not known; each is a logarithm, and their squares add up."""

    cluster: Width  # another cluster than the measured ones
    stack: Width  # other software; nothing else is added but what lies beyond
    chip: Width  # a chip of which no run was seen
    narrow: Width  # products in 8 or 4 bits, where none were measured
    experts: Width  # a mixture of experts, where none was measured
    octave: Mapping[str, Width]  # each doubling beyond the measured range
    pair: Width  # of the ratio of two plans for one job, over that of one of them
    origin: str = ""

    def beyond(self, octaves: Mapping[str, float]) -> float:
        """Return the square that is added for so many doublings of each figure."""
        return math.fsum(
            self.octave.get(name, self.octave[OTHERS]) ** 2 * count
            for name, count in octaves.items()
        )

    def half_width(
        self, calibration: Calibration | None, known: Known, values: Mapping[str, float]
    ) -> float:
        """Return the half-width for a pool that is priced by a calibration, at some values."""
        if calibration is None:
            return math.sqrt(self.chip**2 + self._unlike({}, values))
        own = calibration.fit.half_width
        if known is Known.CHIP or own is None:
            square = self.stack**2 + self._unlike({}, values)
        else:
            square = own**2 + (self.cluster**2 if known is Known.STACK else 0.0)
            square += self._unlike(calibration.ranges, values)
        return math.sqrt(square + self.beyond(calibration.octaves(values)))

    def _unlike(self, ranges: Mapping[str, object], values: Mapping[str, float]) -> float:
        """Return what is added for kinds of work that no calibrating row did."""
        variance = 0.0
        for name, width in ((NARROW, self.narrow), (EXPERTS, self.experts)):
            seen = getattr(ranges.get(name), "high", 0.0)
            if values.get(name, 0.0) > 0.0 and seen <= 0.0:
                variance += width**2
        return variance

    def apart(self, first: float, second: float, half_width: float) -> bool:
        """Tell whether two plans for one job differ by more than predictions are off."""
        return abs(math.log(first / second)) > self.pair * half_width

    def save(self, path: Path) -> None:
        """Write the figures."""
        files.write_text(path, files.pretty_json(document.plain(self)) + "\n")


def measured_half_width(outside: Sequence[str]) -> float:
    """Return the half-width of what a profile says, with the sizes that it was asked beyond."""
    return math.hypot(MEASURED, shipped_widths().octave[OTHERS] if outside else 0.0)


@functools.lru_cache(maxsize=1)
def shipped_widths() -> Widths:
    """Return the widths that ship with the package."""
    text = resources.files("tutti.cost").joinpath(_FILE).read_text(encoding="utf-8")
    return document.build_fields(Widths, files.parse_json(text, _FILE), Place(_FILE))
