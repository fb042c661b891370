"""What a server does with rows between products, compiled for the host: each is read once.

Everything is float32 and lies row by row without gaps, but for what is said otherwise.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from tutti.accelerator.host.softening import exponentials, fast
from tutti.accelerator.host.stream import narrow, widen


def _rms(x: Any, weight: Any, offset: float, eps: float, out: Any) -> None:
    """Write the norm of one row; a weight may be empty."""
    squares = np.float32(0)
    for i in range(len(x)):
        squares += x[i] * x[i]
    factor = np.float32(1) / np.sqrt(squares / np.float32(len(x)) + np.float32(eps))
    if len(weight):
        for i in range(len(x)):
            out[i] = x[i] * factor * (weight[i] + np.float32(offset))
    else:
        for i in range(len(x)):
            out[i] = x[i] * factor


def _add_rms_norm(
    x: Any, residual: Any, weight: Any, offset: float, eps: float, total: Any, normed: Any
) -> None:
    """Write x + residual (which may have no rows: then x is the sum) and its norm."""
    for row in numba.prange(len(x)):
        own = x[row]
        if len(residual):
            own = total[row]
            for i in range(len(own)):
                own[i] = x[row, i] + residual[row, i]
        rms(own, weight, offset, eps, normed[row])


def _gated_silu_row(gate: Any, up: Any, out: Any) -> None:
    """Write silu(gate) · up of one row."""
    powers = np.empty(len(out), np.float32)
    for i in range(len(out)):
        out[i] = -abs(gate[i])
    exponentials(out, powers)
    for i in range(len(out)):
        e = out[i]
        above = gate[i] / (np.float32(1) + e) * up[i]
        out[i] = above if gate[i] >= 0 else above * e


def _gated_silu(x: Any, out: Any) -> None:
    """Write silu(gate) · up of rows [gate | up]."""
    width = out.shape[1]
    for row in numba.prange(len(x)):
        gated_silu_row(x[row, :width], x[row, width:], out[row])


def _add_rms_norm_bits(
    x: Any, residual: Any, weight: Any, offset: float, eps: float, total: Any, normed: Any
) -> None:
    """Write the same of bfloat16's bits; the sum is rounded before it is normed."""
    width = x.shape[1]
    for row in numba.prange(len(x)):
        own, other = np.empty(width, np.float32), np.empty(width, np.float32)
        widen(x[row], own)
        if len(residual):
            widen(residual[row], other)
            for i in range(width):
                own[i] += other[i]
            narrow(own, total[row])
            widen(total[row], own)
        rms(own, weight, offset, eps, other)
        narrow(other, normed[row])


def _gated_silu_bits(x: Any, out: Any) -> None:
    """Write silu(gate) · up of rows [gate | up] of bfloat16's bits."""
    width = out.shape[1]
    for row in numba.prange(len(x)):
        both, own = np.empty(2 * width, np.float32), np.empty(width, np.float32)
        widen(x[row], both)
        gated_silu_row(both[:width], both[width:], own)
        narrow(own, out[row])


def _turn(x: Any, cos: Any, sin: Any, interleaved: bool, out: Any) -> None:
    """Write a head, its first dimensions rotated; in place it goes as well."""
    half = len(cos)
    for i in range(half):
        one, two = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        first, second = x[one], x[two]
        out[one] = first * cos[i] - second * sin[i]
        out[two] = second * cos[i] + first * sin[i]
    for i in range(2 * half, len(x)):
        out[i] = x[i]


def _store_heads_bits(
    x: Any,
    cos: Any,
    sin: Any,
    keys: Any,
    values: Any,
    places: Any,
    query_norm: Any,  # floats
    key_norm: Any,
    offset: float,
    eps: float,
    interleaved: bool,
    queries: Any,
) -> None:
    """Do as `_store_heads` does, of bfloat16's bits."""
    heads, groups, dim = queries.shape[1], keys.shape[1], x.shape[2]
    for t in numba.prange(len(x)):
        own, place = np.empty(dim, np.float32), places[t]
        for n in range(heads + groups):
            widen(x[t, n], own)
            norm = query_norm if n < heads else key_norm
            if len(norm):
                rms(own, norm, offset, eps, own)
            turn(own, cos[t], sin[t], interleaved, own)
            narrow(own, queries[t, n] if n < heads else keys[place, n - heads])
        for n in range(groups):
            values[place, n] = x[t, heads + groups + n]


def _store_heads(
    x: Any,  # (T, H + 2·G, D)
    cos: Any,  # (T, D/2 or less)
    sin: Any,
    keys: Any,  # (places, G, D)
    values: Any,
    places: Any,
    query_norm: Any,  # (D,) or empty
    key_norm: Any,
    offset: float,
    eps: float,
    interleaved: bool,
    queries: Any,  # (T, H, D)
) -> None:
    """Norm and rotate queries and keys; write keys and values to their places."""
    heads, groups = queries.shape[1], keys.shape[1]
    for t in numba.prange(len(x)):
        place = places[t]
        for n in range(heads):
            own = x[t, n]
            if len(query_norm):
                rms(own, query_norm, offset, eps, queries[t, n])
                own = queries[t, n]
            turn(own, cos[t], sin[t], interleaved, queries[t, n])
        for n in range(groups):
            own, to = x[t, heads + n], keys[place, n]
            if len(key_norm):
                rms(own, key_norm, offset, eps, to)
                own = to
            turn(own, cos[t], sin[t], interleaved, to)
            values[place, n] = x[t, heads + groups + n]


rms, turn, gated_silu_row = fast(_rms), fast(_turn), fast(_gated_silu_row)
# each for one thread and for several
add_rms_norm, gated_silu, store_heads = (
    (fast(function), fast(function, parallel=True))
    for function in (_add_rms_norm, _gated_silu, _store_heads)
)
add_rms_norm_bits, gated_silu_bits, store_heads_bits = (
    (fast(function), fast(function, parallel=True))
    for function in (_add_rms_norm_bits, _gated_silu_bits, _store_heads_bits)
)
