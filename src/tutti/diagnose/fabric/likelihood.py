"""Likelihood over path sets: which links or switches explain what paths lost.

Every path has trials, some of them bad. Where a part is bad with chance q, a trial over it is bad
with chance 1 − (1 − ε)(1 − q), elsewhere with the background's ε. The part and the q that make the
trials likeliest are blamed; its paths are left out, and the next one is looked for. Parts that
explain the same trials as well cannot be told apart, and are named together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tutti.fabric.wiring import Floats, Integers

_CHANCES = np.array([0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9, 0.99, 0.9995])
_ALIKE = 2.0  # of log-likelihood: nobody can tell such parts apart


@dataclass(frozen=True, slots=True, kw_only=True)
class PathTrials:
    """A path, the parts on it, and how its trials went."""

    parts: tuple[str, ...]
    trials: int
    bad: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """Parts of which one is bad with this chance; `gain` is what it adds to the log-likelihood."""

    parts: tuple[str, ...]
    chance: float
    gain: float
    trials: int
    bad: int


def blame(
    paths: Sequence[PathTrials], *, background: float, enough: float, most: int = 8
) -> list[Blame]:
    """Return the parts that are to blame, the surest first; none: what is bad is background."""
    names = sorted({part for path in paths if path.bad for part in path.parts})
    number = {name: i for i, name in enumerate(names)}
    at, of = _incidence(paths, number)
    trials = np.array([path.trials for path in paths], dtype=float)
    bad = np.array([path.bad for path in paths], dtype=float)
    blamed: list[Blame] = []
    while names and len(blamed) < most:
        gains = _gains(trials, bad, background, of, at, len(names))
        best, chance = np.unravel_index(int(np.argmax(gains)), gains.shape)
        gain = float(gains[best, chance])
        if gain < enough:
            break
        alike = np.flatnonzero(gains.max(axis=1) > gain - _ALIKE)
        over = of[at == best]
        blamed.append(
            Blame(
                parts=tuple(names[i] for i in alike),
                chance=float(_CHANCES[chance]),
                gain=gain,
                trials=int(trials[over].sum()),
                bad=int(bad[over].sum()),
            )
        )
        explained = of[np.isin(at, alike)]
        trials[explained] = bad[explained] = 0.0
    return blamed


def _incidence(paths: Sequence[PathTrials], number: dict[str, int]) -> tuple[Integers, Integers]:
    """Return part and path of every place where a part that may be bad lies on a path."""
    at, of = [], []
    for i, path in enumerate(paths):
        for part in path.parts:
            if part in number:
                at.append(number[part])
                of.append(i)
    return np.array(at, dtype=np.int64), np.array(of, dtype=np.int64)


def _gains(
    trials: Floats, bad: Floats, floor: float, of: Integers, at: Integers, parts: int
) -> Floats:
    """Return what blaming each part adds to the log-likelihood, by its chance."""
    columns = []
    for chance in _CHANCES:
        raised = 1.0 - (1.0 - floor) * (1.0 - chance)
        path = bad * np.log(raised / floor) + (trials - bad) * np.log(
            (1.0 - raised) / (1.0 - floor)
        )
        columns.append(np.bincount(at, weights=path[of], minlength=parts))
    return np.stack(columns, axis=1)
