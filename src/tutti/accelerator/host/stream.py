"""Rows of the stream in a model's dtype, floats or the bits of bfloat16, compiled for the host."""

from __future__ import annotations

from typing import Any

import numba
import numba.extending
import numpy as np

from tutti.accelerator.host.tiles import compiled


def _widen(row: Any, out: Any) -> None:
    """Write a row of the stream as floats."""
    bits = out.view(np.uint32)
    for i in range(len(row)):
        bits[i] = np.uint32(row[i]) << np.uint32(16)


def _narrow(row: Any, out: Any) -> None:
    """Write a row of floats as the stream has them: to the nearest, ties to even."""
    bits = row.view(np.uint32)
    for i in range(len(row)):
        half = np.uint32(0x7FFF) + ((bits[i] >> np.uint32(16)) & np.uint32(1))
        rounded = (bits[i] + half) >> np.uint32(16)
        out[i] = np.uint16(rounded if row[i] == row[i] else np.uint32(0x7FC0))


def _copied(row: Any, out: Any) -> None:
    for i in range(len(row)):
        out[i] = row[i]


def read(row, out):  # type: ignore[no-untyped-def]  # numba compares
    """Write a stored row as floats; chosen when types are known."""
    raise NotImplementedError


def written(row, out):  # type: ignore[no-untyped-def]
    """Write floats as a row is stored."""
    raise NotImplementedError


@numba.extending.overload(read)
def _read_by_type(row, out):  # type: ignore[no-untyped-def]
    del out
    if row.dtype == numba.types.uint16:
        return lambda row, out: widen(row, out)
    return lambda row, out: copied(row, out)


@numba.extending.overload(written)
def _written_by_type(row, out):  # type: ignore[no-untyped-def]
    del row
    if out.dtype == numba.types.uint16:
        return lambda row, out: narrow(row, out)
    return lambda row, out: copied(row, out)


widen, narrow, copied = compiled(_widen), compiled(_narrow), compiled(_copied)
