"""Which row is which sample: an endless order that depends on the seed and on nothing else.

Global sample g is the i-th sequence of step n when g = n · global_batch + i. Which source it comes
from follows a fixed pattern that spreads sources evenly by weight; which of the source's rows it is
follows a permutation per epoch of that source. Both are looked up, not walked to: no plan and no
number of ranks enters, and a run resumes at any sample at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tutti.errors import InputError
from tutti.train.data.permutation import permuted
from tutti.train.data.row import Row, Rows, blank_row

_PATTERN = 1 << 14  # samples after which the pattern of sources repeats
_HELD_OUT, _EPOCH = 0, 1  # what a permutation is for


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a sample comes from."""

    source: int
    epoch: int
    row: int


class DataPart:
    """The rows of a source that are for training, or those that are held out."""

    def __init__(self, rows: Rows, *, seed: int, number: int, first: int, count: int) -> None:
        self.rows, self.count, self.number = rows, count, number
        self._seed, self._first = seed, first

    def row_of(self, local: int) -> tuple[int, int]:
        """Return epoch and row of the local-th sample of this part."""
        epoch, place = divmod(local, self.count)
        place = permuted(place, self.count, (self._seed, self.number, _EPOCH, epoch))
        return epoch, self.held(place)

    def held(self, place: int) -> int:
        """Return the row at a place of this part, in no epoch's order."""
        if self.count == self.rows.num_rows:
            return place
        seeds = (self._seed, self.number, _HELD_OUT, 0)
        return permuted(self._first + place, self.rows.num_rows, seeds)


def split(
    rows: Rows, *, seed: int, number: int, holdout: float
) -> tuple[DataPart, DataPart | None]:
    """Return the training part and the held-out part: a seeded choice of rows."""
    whole = rows.num_rows
    held = max(1, round(whole * holdout)) if holdout else 0
    if held >= whole:
        raise InputError(
            f"{rows.name}: has {whole} row{'s' * (whole != 1)}, too few to hold out "
            f"{holdout:.2%}; give 'validation' a source of its own"
        )
    train = DataPart(rows, seed=seed, number=number, first=held, count=whole - held)
    if not held:
        return train, None
    return train, DataPart(rows, seed=seed, number=number, first=0, count=held)


class TrainingOrder:
    """The endless order of the training rows of all sources."""

    def __init__(self, parts: Sequence[DataPart], weights: Sequence[float]) -> None:
        self.parts = tuple(parts)
        self._pattern, self._before, self._quotas = _spread(weights)

    def place(self, sample: int) -> Place:
        """Return where a global sample comes from."""
        round_, place = divmod(sample, len(self._pattern))
        source = int(self._pattern[place])
        local = round_ * self._quotas[source] + int(self._before[place])
        epoch, row = self.parts[source].row_of(local)
        return Place(source=source, epoch=epoch, row=row)

    def row(self, sample: int) -> Row:
        """Return the row of a global sample."""
        source, row = self.part_and_row(sample)
        return source.rows.row(row)

    def part_and_row(self, sample: int) -> tuple[DataPart, int]:
        """Return the part that a sample is of, and which of its rows it is."""
        place = self.place(sample)
        return self.parts[place.source], place.row

    def epochs(self, sample: int) -> tuple[float, ...]:
        """Return how often each source has been seen before a sample."""
        round_, place = divmod(sample, len(self._pattern))
        seen = np.bincount(self._pattern[:place], minlength=len(self.parts))
        return tuple(
            (round_ * quota + int(now)) / part.count
            for quota, now, part in zip(self._quotas, seen, self.parts, strict=True)
        )


def run_dry(order: TrainingOrder, samples: int) -> list[str]:
    """Return a line for each source of a mixture that is used up long before another is seen."""
    seen = order.epochs(samples)
    fewest = min(seen)
    other = order.parts[seen.index(fewest)].rows.name
    return [
        f"{part.rows.name}: its {part.count:,} rows are seen {times:.1f} times, and those of "
        f"{other} {fewest:.1f} times; lower its weight, or give it more rows"
        for part, times in zip(order.parts, seen, strict=True)
        if times >= 2 and fewest <= times / 4
    ]


def _spread(
    weights: Sequence[float],
) -> tuple[NDArray[np.int64], NDArray[np.int64], tuple[int, ...]]:
    """Return the source of every place, how many of that source stand before it, and the quotas.

    Weights are rounded to parts of the pattern; every source keeps at least one place.
    """
    if len(weights) == 1:
        return np.zeros(1, np.int64), np.zeros(1, np.int64), (1,)
    shares = np.asarray(weights, np.float64) / sum(weights) * _PATTERN
    quotas = np.maximum(1, np.floor(shares)).astype(np.int64)
    while quotas.sum() < _PATTERN:
        quotas[np.argmax(shares - quotas)] += 1
    sources = np.repeat(np.arange(len(weights)), quotas)
    before = np.concatenate([np.arange(quota) for quota in quotas])
    times = (before + 0.5) / quotas[sources]
    order = np.lexsort((sources, times))
    return sources[order], before[order], tuple(int(quota) for quota in quotas)


class ValidationRows:
    """All held-out rows in a fixed order, and rows without a loss behind the last."""

    def __init__(self, parts: Sequence[DataPart], *, length: int, pad: int) -> None:
        self.parts = tuple(parts)
        self._starts = np.cumsum([0, *(part.count for part in parts)])
        self.blank = blank_row(length, pad)

    @property
    def num_rows(self) -> int:
        """Rows with a loss."""
        return int(self._starts[-1])

    def num_steps(self, global_batch: int) -> int:
        """Steps of `global_batch` rows that see every row."""
        return -(-self.num_rows // global_batch)

    def row(self, sample: int) -> Row:
        """Return a row; one without a loss behind the last."""
        if sample >= self.num_rows:
            return self.blank
        own, row = self.part_and_row(sample)
        return own.rows.row(row)

    def part_and_row(self, sample: int) -> tuple[DataPart, int]:
        """Return the part that a row with a loss is of, and which of its rows it is."""
        part = int(np.searchsorted(self._starts, sample, "right")) - 1
        own = self.parts[part]
        return own, own.held(sample - int(self._starts[part]))
