"""Keys as kernels take them: every run of queries has keys of its own, one run after the other.

Ranks that share a sequence have runs of queries that look at the same keys, or at a part of those
at hand. `followed` lays the keys out anew: a few slices side by side, whose gradients autograd adds
up where they overlap.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tutti.accelerator.segments import Segments

MOST_SLICES = 64  # each costs a pass over the gradients of all keys


def followed(k: Tensor, v: Tensor, segments: Segments) -> tuple[Tensor, Tensor, Segments]:
    """Return keys, values and segments of which the runs of keys fill the rows in order."""
    if segments.keys_follow and k.shape[0] == sum(segments.keys):
        return k, v, segments
    parts, again = _laid_out(segments)
    if len(parts) == 1:
        own = slice(*parts[0])
        return k[own], v[own], again

    def side_by_side(rows: Tensor) -> Tensor:
        return torch.cat([rows[first:last] for first, last in parts])

    return side_by_side(k), side_by_side(v), again


def scattered(segments: Segments) -> str | None:
    """Say why keys cannot be laid out anew at a reasonable price."""
    many = not segments.keys_follow and len(_laid_out(segments)[0]) > MOST_SLICES
    return f"keys in at most {MOST_SLICES} slices only" if many else None


@functools.lru_cache(maxsize=64)  # every layer of a batch asks for the same
def _laid_out(segments: Segments) -> tuple[tuple[tuple[int, int], ...], Segments]:
    slices: list[tuple[int, int]] = []
    starts, total = [], 0
    for first, keys in zip(segments.key_starts, segments.keys, strict=True):
        if slices and slices[-1][1] == first:
            slices[-1] = (slices[-1][0], first + keys)
        else:
            slices.append((first, first + keys))
        starts.append(total)
        total += keys
    again = Segments(segments.queries, segments.keys, tuple(starts), across=segments.across)
    return tuple(slices), again
