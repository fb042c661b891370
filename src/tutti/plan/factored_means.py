"""What Adafactor keeps of a tensor: means of squares over rows and columns. Pure."""

from __future__ import annotations

import math

MEAN_BYTES = 4.0


def mean_shapes(shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Return the means of a tensor and their shapes; of a vector each element has its own."""
    if len(shape) < 2:
        return {"square": shape}
    return {"row": shape[:-1], "column": (*shape[:-2], shape[-1])}


def num_means(shape: tuple[int, ...]) -> int:
    """Return how many numbers that is."""
    return sum(math.prod(own) for own in mean_shapes(shape).values())
