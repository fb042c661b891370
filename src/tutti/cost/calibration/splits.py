"""Which rows calibrate and which are scored: every k-th row by id, whole cells, folds.

A cell is a set of rows that reveal each other; a row is scored only by fits that saw no row of its
cell. No group gives more than a third of its rows; where a stack has several groups, the small ones
come first and the largest fills what is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tutti.cost.calibration.table import Rows, RunTable

MOST_ROWS = 40  # per chip and stack
LEAST_STRIDE = 3  # at most a third of a group
FOLDS = 5


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """Rows to calibrate on, and rows to score."""

    calibrate: Rows
    score: Rows


def strides(sizes: Mapping[str, int], most: int = MOST_ROWS) -> dict[str, int]:
    """Return k of "every k-th row" for each group, so that at most `most` rows calibrate."""
    left, stride = most, dict.fromkeys(sizes, 0)
    by_size = sorted((g for g in sizes if sizes[g]), key=lambda g: (sizes[g], g))
    for index, group in enumerate(by_size):
        size = sizes[group]
        quota = min(size // LEAST_STRIDE, left // (len(by_size) - index))
        if quota:
            # The least k for which size ÷ k, rounded down, is no more than the quota.
            stride[group] = max(LEAST_STRIDE, size // (quota + 1) + 1)
            left -= size // stride[group]
    return stride


def by_id(table: RunTable, allowed: Rows | None = None) -> dict[str, Rows]:
    """Return the rows of each group in the order of their ids."""
    rows = range(len(table)) if allowed is None else [int(i) for i in allowed]
    groups: dict[str, list[int]] = {}
    for row in sorted(rows, key=lambda i: table.runs[i].id):
        groups.setdefault(table.runs[row].group, []).append(row)
    return {group: np.array(members, dtype=np.intp) for group, members in groups.items()}


def calibration_rows(
    table: RunTable, *, most: int = MOST_ROWS, offset: int = 0, allowed: Rows | None = None
) -> Rows:
    """Return every k-th row by id of each group, from row `offset` on."""
    groups = by_id(table, allowed)
    every = strides({group: len(rows) for group, rows in groups.items()}, most)
    chosen = [
        rows[offset % k :: k][: len(rows) // k] for g, rows in groups.items() if (k := every[g])
    ]
    return np.sort(np.concatenate(chosen)) if chosen else np.zeros(0, dtype=np.intp)


def held_out(table: RunTable, calibrate: Rows, candidates: Sequence[int]) -> Rows:
    """Return the candidates of whose cells no row calibrates."""
    seen = {table.runs[i].cell for i in calibrate}
    return np.array([i for i in candidates if table.runs[i].cell not in seen], dtype=np.intp)


def splits(table: RunTable, most: int, allowed: Rows | None = None) -> Iterator[Split]:
    """Yield all splits: folds for a small table, otherwise every offset of every k-th row.

    With `allowed`, only those rows may calibrate and only the others are scored.
    """
    if allowed is None and len(table) * (FOLDS - 1) <= most * FOLDS:
        yield from _folds(table)
        return
    groups = by_id(table, allowed)
    every = strides({group: len(rows) for group, rows in groups.items()}, most)
    outside = set(range(len(table))) if allowed is None else _others(table, allowed)
    for offset in range(max([1, *every.values()])):
        chosen = calibration_rows(table, most=most, offset=offset, allowed=allowed)
        yield Split(chosen, held_out(table, chosen, sorted(outside)))


def _others(table: RunTable, allowed: Rows) -> set[int]:
    return set(range(len(table))) - {int(i) for i in allowed}


def _folds(table: RunTable) -> Iterator[Split]:
    rows = np.concatenate([np.zeros(0, dtype=np.intp), *by_id(table).values()])
    for fold in range(min(FOLDS, len(rows))):
        scored = rows[fold::FOLDS]
        others = np.setdiff1d(rows, scored)
        cells = {table.runs[i].cell for i in scored}
        kept = [i for i in others if table.runs[i].cell not in cells]
        yield Split(np.array(kept, dtype=np.intp), np.sort(scored))


def num_splits(table: RunTable, most: int, allowed: Rows | None = None) -> int:
    """Return how many splits there will be."""
    return sum(1 for _ in splits(table, most, allowed))
