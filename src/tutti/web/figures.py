"""Figures of ranks, hosts and links over time, as a matrix: rows are whose, columns are when.

A matrix travels as the upper halves of 32-bit numbers (three digits), packed in base64. What came
after a moment can be asked for alone, so that a page that watches gets columns, not matrices.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tutti.errors import InputError
from tutti.observe.figures import FIGURES, label_of
from tutti.observe.rank_series import FILE
from tutti.observe.store import LEVELS, Series, SeriesStore

MOST_COLUMNS = 300
_MOST_ROWS = 4096
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Matrix:
    """A figure of many over time; not a number where there is no value."""

    figure: str
    rows: tuple[str, ...]  # whose
    hosts: tuple[str, ...]  # of each row: the node ("pool-node"), or "" of ranks
    labels: tuple[str, ...]
    seconds: npt.NDArray[np.int64]
    values: Floats  # rows × seconds
    every_s: int
    left_out: int = 0

    def to_document(self) -> dict[str, object]:
        """Return plain values."""
        about = FIGURES.get(self.figure)
        return {
            "figure": self.figure,
            "means": about.means if about else "",
            "rate": bool(about and about.kind == "counter"),
            "rows": list(self.rows),
            "seconds": self.seconds.tolist(),
            "every_s": self.every_s,
            "values": packed(self.values),
            "left_out": self.left_out,
        }


def packed(values: Floats) -> str:
    """Return numbers as base64 of the upper halves of their 32 bits, row by row."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = np.where(np.isnan(values), bits, bits + 0x8000) >> 16
    return base64.b64encode(rounded.astype("<u2").tobytes()).decode()


class RunSeries:
    """The stores of a run's folder, read while they are written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stores: dict[Path, SeriesStore] = {}

    def _opened(self, notes: list[str]) -> list[tuple[str, SeriesStore]]:
        opened = []
        for path in sorted(self._folder.glob("*.sqlite")):
            try:
                if path not in self._stores:
                    self._stores[path] = SeriesStore(path, read_only=True)
                opened.append(("" if path.name == FILE else path.stem, self._stores[path]))
            except InputError as error:
                notes.append(str(error))
        return opened

    def names(self, notes: list[str]) -> list[str]:
        """Return the figures that there are, without labels, in the order of their table."""
        stored = set()
        for _, store in self._opened(notes):
            try:
                stored |= {name.partition("{")[0] for name in store.names()}
            except InputError as error:
                notes.append(str(error))
        known = [name for name in FIGURES if name in stored]
        return [n for n in known if n.startswith("tutti_rank_")] + [
            n for n in known if not n.startswith("tutti_rank_")
        ]

    def newest(self, notes: list[str]) -> int:
        """Return the last second of which there is anything; 0 where there is nothing."""
        seconds = [0]
        for _, store in self._opened(notes):
            try:
                seconds.append(store.last_second())
            except InputError as error:
                notes.append(str(error))
        return max(seconds)

    def stamp(self) -> tuple[int, ...]:
        """Return what differs once a store was written; cheap."""
        try:
            return tuple(store.version() for _, store in self._opened([]))
        except InputError:
            return ()

    def matrix(
        self, figure: str, *, span_s: int, notes: list[str], after: int = 0, until: int = 0
    ) -> Matrix:
        """Return the last `span_s` of a figure, or what came `after` a second."""
        stop = (until or self.newest(notes)) + 1
        level = next((n for n in LEVELS if span_s / n <= MOST_COLUMNS), LEVELS[-1])
        start = max(after + 1, stop - span_s)
        series: list[tuple[str, Series]] = []
        for node, store in self._opened(notes):
            try:
                series += [(node, one) for one in store.read(figure, start, stop, level=level)]
            except InputError as error:
                notes.append(str(error))
        series.sort(key=lambda one: _order(one[0], label_of(one[1].name)))
        return _matrix(figure, series[:_MOST_ROWS], level, max(0, len(series) - _MOST_ROWS))


def _order(node: str, label: str) -> tuple[str, int, str]:
    return (node, int(label) if label.isdigit() else -1, label)


def _matrix(figure: str, series: Sequence[tuple[str, Series]], level: int, over: int) -> Matrix:
    seconds = np.unique(np.concatenate([s.seconds for _, s in series] or [np.zeros(0, np.int64)]))
    values: Floats = np.full((len(series), len(seconds)), np.nan, np.float32)
    for row, (_, one) in enumerate(series):
        values[row, np.searchsorted(seconds, one.seconds)] = one.mean
    if len(seconds) > MOST_COLUMNS:  # a run of days: neighbours are joined
        seconds, values = _joined(seconds, values)
    labels = tuple(label_of(one.name) for _, one in series)
    return Matrix(
        figure=figure,
        rows=tuple(_row(n, t, figure) for (n, _), t in zip(series, labels, strict=True)),
        hosts=tuple(node for node, _ in series),
        labels=labels,
        seconds=seconds,
        values=values,
        every_s=level,
        left_out=over,
    )


def _joined(seconds: npt.NDArray[np.int64], values: Floats) -> tuple[npt.NDArray[np.int64], Floats]:
    every = -(-len(seconds) // MOST_COLUMNS)
    begins = np.arange(0, len(seconds), every)
    known = np.isfinite(values)
    sums = np.add.reduceat(np.where(known, values, 0), begins, axis=1)
    counts = np.add.reduceat(known, begins, axis=1)
    mean = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan).astype(np.float32)
    return seconds[begins], mean


def _row(node: str, label: str, figure: str) -> str:
    if not node:
        return f"rank {label}"
    return f"{node} {label}".strip() if FIGURES[figure].label else node
