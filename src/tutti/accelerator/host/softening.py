"""Scores to weights: exponentials as vectors, and what models do to scores; for the host."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

# sums in any order, fused products; what is no number stays none
FAST = {"reassoc", "contract", "arcp", "nsz"}


def _exponentials(line: Any, powers: Any) -> Any:
    """Put e to the power of numbers that are at most 0 in their place; return the sum.

    In single precision by a polynomial and a power of two, which the compiler can make vectors of:
    e^x = 2^n · e^f with |f| ≤ ½ ln 2, where six terms leave 1e-7.
    """
    total = line[0] * 0.0
    if line.itemsize != 4:
        for i in range(len(line)):
            line[i] = np.exp(line[i])
            total += line[i]
        return total
    exponents = powers.view(np.int32)
    for i in range(len(line)):
        twos = max(line[i], np.float32(-87.0)) * np.float32(1.4426950408889634)
        whole = np.floor(twos + np.float32(0.5))
        f = (twos - whole) * np.float32(0.6931471805599453)
        p = f * np.float32(1 / 720) + np.float32(1 / 120)
        p = p * f + np.float32(1 / 24)
        p = p * f + np.float32(1 / 6)
        p = p * f + np.float32(0.5)
        p = p * f + np.float32(1.0)
        line[i] = p * f + np.float32(1.0)
        exponents[i] = (np.int32(whole) + np.int32(127)) << np.int32(23)
    for i in range(len(line)):
        line[i] *= powers[i]
        total += line[i]
    return total


def _soften(
    line: Any,
    powers: Any,
    head: int,
    first: int,
    scale: float,
    soft_cap: float,
    sinks: Any,
    slopes: Any,
) -> None:
    """Turn a query's products with the keys from `first` on into weights."""
    for key in range(len(line)):
        line[key] *= scale
    if soft_cap != 0.0:
        for key in range(len(line)):
            line[key] = soft_cap * np.tanh(line[key] / soft_cap)
    if len(slopes):
        for key in range(len(line)):
            line[key] += slopes[head] * (key + first)
    largest = line[0]
    for key in range(1, len(line)):
        largest = max(largest, line[key])
    if len(sinks):
        largest = max(largest, sinks[head])
    check = largest * 0
    for key in range(len(line)):
        line[key] -= largest
        check += line[key]
    whole = exponentials(line, powers)
    if check != check:  # a score that is no number: neither is what comes of it
        whole = check
    if len(sinks):
        whole += np.exp(sinks[head] - largest)
    part = line.dtype.type(1) / whole
    for key in range(len(line)):
        line[key] *= part


def fast(function: Any, *, parallel: bool = False) -> Any:
    """Return a compiled function, kept on disk where there is a place for it."""
    options: dict[str, Any] = {"fastmath": FAST, "parallel": parallel, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no folder to keep it in
        return numba.njit(**options)(function)


exponentials, soften = fast(_exponentials), fast(_soften)
