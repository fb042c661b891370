"""What a token leaves behind for those after it: keys and values, or a latent."""

from __future__ import annotations

import math
from collections.abc import Iterable

from tutti.models.parts import AttentionSpec
from tutti.models.spec import ModelSpec

SCALE_BYTES = 4.0  # of the scale beside each head's keys, or values, in 8 bits


def page_shapes(spec: AttentionSpec, tensor_ranks: int) -> tuple[tuple[int, ...], ...]:
    """Return what one token takes in each tensor of a unit: keys and values, or a latent."""
    if spec.latent is not None:
        return ((spec.latent.kv_rank + spec.latent.rope_dim,),)
    heads = max(1, spec.kv_heads // tensor_ranks)
    return ((heads, spec.head_dim), (heads, spec.value_dim))


def cached_bytes(
    spec: ModelSpec, units: Iterable[int], *, tp: int = 1, stored: float = 2.0, stream: float = 2.0
) -> float:
    """Return the bytes of pages that one token takes on a rank that holds some units.

    `stored` are the bytes of a stored number, `stream` those of activations; where they differ,
    scales stand beside the numbers. Latents are always held as activations are.
    """
    total = 0.0
    for unit in units:
        if not 1 <= unit <= spec.num_layers:
            continue
        attention = spec.block(unit).attention
        narrow = stored < stream and attention.latent is None
        for shape in page_shapes(attention, tp):
            total += math.prod(shape) * (stored if narrow else stream)
            total += shape[0] * SCALE_BYTES if narrow else 0.0
    return total
