"""Calibrations: fitted constants of a chip under a software stack, as versioned JSON files.

A calibration says which rows it was fitted on, how well it fits them, and which range they cover;
a prediction outside that range is an extrapolation and is called so. It holds constants only:
nothing here can look a measured row up. `tutti calibrate` writes the files that ship.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from tutti import document, files
from tutti.cost.calibration.stacks import stacks
from tutti.cost.constants import Constants, registry
from tutti.document import Place
from tutti.errors import InputError, hint

FORMAT = 1
_FOLDER = "calibrations"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A constant of a calibration."""

    value: float
    unit: str
    free: bool = True  # fitted; otherwise the stack's own prior


@dataclass(frozen=True, slots=True, kw_only=True)
class FitReport:
    """How well the constants fit the rows they were fitted on."""

    rows: int
    mape_pct: float
    worst_pct: float
    half_width: float | None = None  # ln: 8 of 10 rows that a fit did not see are less far off


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The least and the greatest value among the calibration rows."""

    low: float
    high: float

    def holds(self, value: float) -> bool:
        """Tell whether a value lies inside, by a hair's breadth."""
        return self.low * (1 - 1e-9) <= value <= self.high * (1 + 1e-9)

    def octaves(self, value: float) -> float:
        """Return by how many doublings or halvings a value lies outside."""
        if self.holds(value) or min(value, self.low) <= 0:
            return 0.0
        return abs(math.log2(value / (self.high if value > self.high else self.low)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Constants fitted from measured runs of one stack."""

    format: int = FORMAT
    name: str
    stack: str
    chips: tuple[str, ...]  # catalog names that the constants hold for
    groups: tuple[str, ...]  # of runs, each a cluster of its own
    date: str
    origin: str
    rule: str
    compute: Mapping[str, Fitted]
    clusters: Mapping[str, Mapping[str, Fitted]]
    fit: FitReport
    ranges: Mapping[str, Range]
    rows: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(
                f"'format' is {self.format}, but this tutti reads {FORMAT}; calibrate again with it"
            )
        known = registry()
        for constants in (self.compute, *self.clusters.values()):
            for name, fitted in constants.items():
                if name not in known:
                    raise ValueError(f"there is no constant '{name}'; {hint(name, known)}")
                if fitted.unit != known[name].unit:
                    raise ValueError(f"'{name}' is in {fitted.unit}, not in {known[name].unit}")

    @property
    def label(self) -> str:
        """What a prediction that rests on it says of itself."""
        return f"calibrated: {self.name} ({self.stack}, {self.fit.rows} runs, {self.date})"

    def constants(self, group: str | None = None) -> Constants:
        """Return all constants; for a cluster that was not measured, the middle of those that were.

        The middle is the geometric mean, for the constants' priors are log-normal.
        """
        values = {name: fitted.value for name, fitted in self.compute.items()}
        if group is not None and group in self.clusters:
            values |= {name: fitted.value for name, fitted in self.clusters[group].items()}
        elif self.clusters:
            names = next(iter(self.clusters.values()))
            for name in names:
                logs = [math.log(cluster[name].value) for cluster in self.clusters.values()]
                values[name] = math.exp(sum(logs) / len(logs))
        return Constants(**values)

    def extrapolations(self, **values: float) -> tuple[str, ...]:
        """Return which of the values (hidden=8192, tp=16, …) lie outside what was measured."""
        notes = []
        for name, value in values.items():
            seen = self.ranges.get(name)
            if seen is not None and not seen.holds(value):
                notes.append(f"{name} {value:g} outside {seen.low:g} to {seen.high:g}")
        return tuple(notes)

    def octaves(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return by how many doublings the values lie outside what was measured."""
        return {n: self.ranges[n].octaves(v) for n, v in values.items() if n in self.ranges}

    @classmethod
    def from_text(cls, text: str, name: str) -> Calibration:
        """Read the written form; anything wrong is one line."""
        return document.build_fields(cls, files.parse_json(text, name), Place(name))

    def save(self, folder: Path) -> Path:
        """Write NAME.json into a folder, as a whole or not at all."""
        path = folder / f"{self.name}.json"
        written = {"format": self.format, **document.plain(self)}
        files.write_text(path, files.pretty_json(written) + "\n")
        return path


@functools.lru_cache(maxsize=1)
def shipped_calibrations() -> tuple[Calibration, ...]:
    """Return the calibrations that ship with the package, in the order of their names."""
    folder = resources.files("tutti.cost").joinpath(_FOLDER)
    entries = sorted(
        (f for f in folder.iterdir() if f.name.endswith(".json")), key=lambda f: f.name
    )
    return tuple(Calibration.from_text(f.read_text(encoding="utf-8"), f.name) for f in entries)


def load_calibrations(folder: Path) -> tuple[Calibration, ...]:
    """Return the calibrations of a folder, in the order of their names."""
    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix == ".json")
    except OSError as error:
        raise InputError(f"{folder}: cannot be read ({error.strerror})") from None
    if not paths:
        raise InputError(f"{folder}: holds no calibration (.json); `tutti calibrate` writes them")
    return tuple(Calibration.from_text(files.read_text(path), path.name) for path in paths)


def load_calibration(chip_name: str, stack: str | None = None) -> Calibration | None:
    """Return the shipped calibration that suits a chip and a software stack best, or None.

    Among those of the chip, the one that shares most words with `stack` wins; otherwise the first
    in the order of `stacks.yaml`.
    """
    return best_match(shipped_calibrations(), chip_name, stack)


def best_match(
    calibrations: Iterable[Calibration], chip_name: str, stack: str | None
) -> Calibration | None:
    """Return the calibration that suits a chip and a stack best, or None."""
    wanted = _words(stack or "")

    order = list(stacks())

    def worth(calibration: Calibration) -> tuple[int, int]:
        shared = len(wanted & _words(f"{calibration.stack} {calibration.name}"))
        known = calibration.name in order
        return shared, -order.index(calibration.name) if known else -len(order)

    suitable = [c for c in calibrations if chip_name in c.chips]
    return max(suitable, key=worth, default=None)


def of_stack(calibration: Calibration, stack: str) -> bool:
    """Tell whether a calibration is of the software that somebody names."""
    return bool(_words(stack) & _words(calibration.stack))


def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z]{3,}", text.casefold()))
