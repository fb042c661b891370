"""Distinct combinations of columns, found without sorting where the values are small numbers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tutti.cost.arrays import Arrays, FloatArray

Index = npt.NDArray[np.intp]

_LARGEST_CODE = 1 << 16  # above this a column is sorted instead of counted
_LARGEST_TABLE = 1 << 22


class Distinct(NamedTuple):
    """One row of each combination, and for every row the number of its combination."""

    first: Index
    inverse: Index


def distinct_rows(arrays: Arrays, columns: tuple[str, ...]) -> Distinct | None:
    """Return the distinct rows of some columns; None where no column has more than one row."""
    key: Index | None = None
    radix = 1
    for name in columns:
        values: FloatArray = getattr(arrays, name)
        if values.ndim == 0:
            continue
        code, size = _codes(values)
        if size == 1:
            key = code if key is None else key
            continue
        if radix * size > _LARGEST_TABLE and key is not None:
            key, radix = _renumbered(key)
        key = code if key is None else key * size + code
        radix *= size
    if key is None:
        return None
    return _counted(key, radix) if radix <= _LARGEST_TABLE else _sorted(key)


def _codes(values: FloatArray) -> tuple[Index, int]:
    """Return small numbers that stand for the values, and how many numbers there may be."""
    low, high = float(values.min()), float(values.max())
    if low == high:
        return np.zeros(values.shape, dtype=np.intp), 1
    if low >= 0 and high < _LARGEST_CODE:
        code = values.astype(np.intp)
        if np.array_equal(code, values):
            return code - int(low), int(high) - int(low) + 1
    codes, code = np.unique(values, return_inverse=True)
    return code.astype(np.intp), len(codes)


def _counted(key: Index, radix: int) -> Distinct:
    row = np.full(radix, -1, dtype=np.intp)
    row[key] = np.arange(len(key), dtype=np.intp)
    used = np.flatnonzero(row >= 0)
    number = np.empty(radix, dtype=np.intp)
    number[used] = np.arange(len(used), dtype=np.intp)
    return Distinct(row[used], number[key])


def _sorted(key: Index) -> Distinct:
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    return Distinct(first, inverse.astype(np.intp))


def _renumbered(key: Index) -> tuple[Index, int]:
    codes, code = np.unique(key, return_inverse=True)
    return code.astype(np.intp), len(codes)
