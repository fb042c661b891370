"""A whole block of a dense model on a server's rows of few tokens each, compiled for the host.

Between two products nothing leaves the processor's caches, and nobody waits for an interpreter.
Sums are float32 throughout; the stream between blocks has the model's dtype: floats, or the bits
of bfloat16. Weights lie in panels (`tiles`).
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from tutti.accelerator.host.row_attention import attend_row
from tutti.accelerator.host.rows_kernels import gated_silu_row, rms, turn
from tutti.accelerator.host.stream import read, written
from tutti.accelerator.host.tiles import compiled, panel_product


def _added(row: Any, stream: Any, total: Any) -> None:
    """Add floats to a row of the stream; write it as it is stored, which is what goes on."""
    for i in range(len(stream)):
        stream[i] += row[i]
    written(stream, total)
    read(total, stream)


def _store_row(
    heads: Any,  # (H + 2·G)·D numbers or more
    cos: Any,
    sin: Any,
    keys: Any,  # (G, D): the token's place in its page
    values: Any,
    norms: Any,  # (2, D) or (2, 0)
    offset: float,
    eps: float,
    interleaved: bool,
    queries: Any,  # (H, D)
) -> None:
    """Norm and rotate a token's queries and keys; write keys and values to their place."""
    count, dim = queries.shape
    for n in range(count + len(keys)):
        own = heads[n * dim : n * dim + dim]
        if norms.shape[1]:
            rms(own, norms[0 if n < count else 1], offset, eps, own)
        turn(own, cos, sin, interleaved, own)
        if n < count:
            queries[n] = own
        else:
            written(own, keys[n - count])
    for n in range(len(values)):
        at = (count + len(keys) + n) * dim
        written(heads[at : at + dim], values[n])


def _heads(
    mixed: Any,  # (T, (H + 2·G)·D)
    constants: Any,  # eps, offset of norms' weights, scale of scores
    heads: int,
    interleaved: bool,
    head_norms: Any,  # (2, D) or (2, 0): of queries, of keys
    cos: Any,
    sin: Any,
    key_pages: Any,
    value_pages: Any,
    places: Any,
    tables: Any,
    owners: Any,
    lengths: Any,
    firsts: Any,
    attended: Any,  # (T, H·D)
) -> None:
    """Norm and rotate heads, write keys and values, and fill in the attention of each token."""
    rows, size, dim = len(mixed), key_pages.shape[1], key_pages.shape[3]
    queries = np.empty((rows, heads, dim), np.float32)
    found = np.empty((rows, heads, dim), np.float32)
    wide = np.empty((rows, mixed.shape[1]), np.float32)
    none = np.empty(0, np.float32)
    for t in numba.prange(rows):
        page, at = places[t] // size, places[t] % size
        read(mixed[t], wide[t])
        store_row(
            wide[t], cos[t], sin[t], key_pages[page, at], value_pages[page, at], head_norms,
            constants[1], constants[0], interleaved, queries[t],
        )  # fmt: skip
    for t in numba.prange(rows):
        attend_row(
            found[t], queries[t], key_pages, value_pages, tables[owners[t]], firsts[t], lengths[t],
            0, key_pages.shape[2], constants[2], 0.0, none, none,
        )  # fmt: skip
        written(found[t].reshape(heads * dim), attended[t])


def _block(
    x: Any,  # (T, C)
    added: Any,  # (T, C) or (0, C): what the block before left
    constants: Any,  # eps, offset of norms' weights, scale of scores
    heads: int,
    interleaved: bool,
    norms: Any,  # (2, C): before attention, before the feed-forward layer
    head_norms: Any,  # (2, D) or (2, 0): of queries, of keys
    qkv: Any,
    output: Any,
    up: Any,
    down: Any,
    cos: Any,
    sin: Any,
    key_pages: Any,  # (P, size, G, D), of the stream's kind
    value_pages: Any,
    places: Any,
    tables: Any,
    owners: Any,  # the row of the tables that is each token's
    lengths: Any,  # keys that each token sees, its own included
    firsts: Any,  # the first of them
    total: Any,  # the stream after attention
    more: Any,  # what the feed-forward layer adds
) -> None:
    """Fill in the stream, and what is to be added to it."""
    rows, width = x.shape
    size, groups, dim = key_pages.shape[1], key_pages.shape[2], key_pages.shape[3]
    hidden, depth = heads * dim, down.shape[1]
    eps, offset, scale = constants[0], constants[1], constants[2]
    stream, normed = np.empty((rows, width), np.float32), np.empty((rows + 1, width), np.float32)
    mixed = np.empty((rows + 1, qkv.shape[0] * qkv.shape[2]), np.float32)
    queries = np.empty((rows, heads, dim), np.float32)
    attended = np.empty((rows + 1, heads, dim), np.float32)
    back = np.empty((rows + 1, output.shape[0] * output.shape[2]), np.float32)
    wide = np.empty((rows + 1, up.shape[0] * up.shape[2]), np.float32)
    gated = np.empty((rows + 1, depth), np.float32)
    none = np.empty(0, np.float32)
    normed[rows], attended[rows], gated[rows] = 0.0, 0.0, 0.0  # nobody's rows: no odd numbers
    for t in numba.prange(rows):
        read(x[t], stream[t])
        normed[t] = np.float32(0)
        if len(added):
            read(added[t], normed[t])
        plus(normed[t], stream[t], total[t])
        rms(stream[t], norms[0], offset, eps, normed[t])
    for number in numba.prange(qkv.shape[0]):
        panel_product(normed, rows, qkv, number, mixed)
    for t in numba.prange(rows):
        page, at = places[t] // size, places[t] % size
        store_row(
            mixed[t], cos[t], sin[t], key_pages[page, at], value_pages[page, at], head_norms,
            offset, eps, interleaved, queries[t],
        )  # fmt: skip
    for t in numba.prange(rows):  # now that the keys of all tokens are there
        attend_row(
            attended[t], queries[t], key_pages, value_pages, tables[owners[t]], firsts[t],
            lengths[t], 0, groups, scale, 0.0, none, none,
        )  # fmt: skip
    flat = attended.reshape((rows + 1, hidden))
    for number in numba.prange(output.shape[0]):
        panel_product(flat, rows, output, number, back)
    for t in numba.prange(rows):
        plus(back[t, :width], stream[t], total[t])
        rms(stream[t], norms[1], offset, eps, normed[t])
    for number in numba.prange(up.shape[0]):
        panel_product(normed, rows, up, number, wide)
    for t in numba.prange(rows):
        gated_silu_row(wide[t, :depth], wide[t, depth : 2 * depth], gated[t])
    for number in numba.prange(down.shape[0]):
        panel_product(gated, rows, down, number, back)
    for t in numba.prange(rows):
        written(back[t, :width], more[t])


plus, store_row = compiled(_added), compiled(_store_row)
block = compiled(_block), compiled(_block, parallel=True)
heads = compiled(_heads), compiled(_heads, parallel=True)
