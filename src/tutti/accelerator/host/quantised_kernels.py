"""Codes to float32, compiled for the host: rows `first` … of a weight into memory that is there.

Each function: found (rows, in) float32; codes (out, …); scales (blocks of rows, blocks of columns)
and zeros, of the same shape or empty, float32; height and width of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np


def _of_int8(
    out: Any, codes: Any, scales: Any, zeros: Any, height: int, width: int, first: int
) -> None:
    for row in numba.prange(out.shape[0]):
        own = (first + row) // height
        for block in range(scales.shape[1]):
            into = out[row, block * width : block * width + width]
            line = codes[first + row, block * width : block * width + width]
            scale = scales[own, block]
            zero = zeros[own, block] if zeros.size else np.float32(0)
            for j in range(into.shape[0]):
                into[j] = (np.float32(line[j]) - zero) * scale


def _of_int4(
    out: Any, codes: Any, scales: Any, zeros: Any, height: int, width: int, first: int
) -> None:
    for row in numba.prange(out.shape[0]):
        own, step = (first + row) // height, width // 2
        for block in range(scales.shape[1]):
            into = out[row, block * width : block * width + width]
            line = codes[first + row, block * step : block * step + step]
            scale = scales[own, block]
            zero = zeros[own, block] if zeros.size else np.float32(0)
            for j in range(line.shape[0]):
                both = np.int32(line[j])
                into[2 * j] = (np.float32((both & 15) - 8) - zero) * scale
                into[2 * j + 1] = (np.float32((both >> 4) - 8) - zero) * scale


def _of_float8(
    out: Any,
    bits: Any,  # the memory of `found` as int32
    codes: Any,
    scales: Any,
    height: int,
    width: int,
    first: int,
    shift: int,
    bias: int,
    least: Any,
) -> None:
    """Exponent and fraction are shifted to where float32 has its own, and the bias is made up for.

    Numbers below the smallest exponent have no leading one: it is taken off again.
    """
    half, two = least / np.float32(2), np.float32(2)
    up, added = np.int32(shift), np.int32(bias << 23)
    for row in numba.prange(out.shape[0]):
        own, raw, whole = (first + row) // height, bits[row], codes[first + row]
        for j in range(raw.shape[0]):
            raw[j] = ((np.int32(whole[j]) & np.int32(127)) << up) + added
        for block in range(scales.shape[1]):
            into = out[row, block * width : block * width + width]
            line = codes[first + row, block * width : block * width + width]
            scale = scales[own, block]
            for j in range(into.shape[0]):
                size = into[j]
                size = size if size >= least else (size - half) * two
                into[j] = (-size if line[j] > 127 else size) * scale


def _compiled(function: Callable[..., None]) -> tuple[Any, Any]:
    """Return a kernel for one thread and for several, kept on disk where there is a place."""
    try:
        return tuple(numba.njit(cache=True, parallel=p)(function) for p in (False, True))  # type: ignore[return-value]
    except RuntimeError:  # no folder to keep them in
        return tuple(numba.njit(parallel=p)(function) for p in (False, True))  # type: ignore[return-value]


of_int8, of_int4, of_float8 = (_compiled(f) for f in (_of_int8, _of_int4, _of_float8))
