"""How tensors lie in memory, for kernels that take them element by element.

A part of a stored parameter (the gates of all experts, which stand beside the ups) is no single run
of memory but equally long runs at equal distances. A kernel that knows both walks any such tensor;
no copy is needed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from torch import Size, Tensor

MOST_RUNS = 65_535  # shorter ones are not worth a kernel that knows them


class Runs(NamedTuple):
    """Equally long runs of memory that several tensors have in common."""

    number: int
    length: int
    steps: tuple[int, ...]  # from one run's first element to the next one's, for each tensor


def common_runs(tensors: Sequence[Tensor]) -> Runs | None:
    """Return the runs in which all tensors lie, in the same order of elements; None: none."""
    return _common(tuple((tensor.shape, tensor.stride()) for tensor in tensors))


@functools.lru_cache(maxsize=8192)  # every step asks for the same
def _common(layouts: tuple[tuple[Size, tuple[int, ...]], ...]) -> Runs | None:
    size = layouts[0][0].numel()
    if not size:
        return Runs(1, 0, (0,) * len(layouts))
    runs = [own for layout in layouts if (own := _runs(*layout)) and layout[0].numel() == size]
    lengths = {length for length, _ in runs if length != size} or {size}
    length = lengths.pop()
    if lengths or len(runs) < len(layouts) or size // length > MOST_RUNS:
        return None
    return Runs(size // length, length, tuple(step if own < size else length for own, step in runs))


def _runs(shape: Size, strides: tuple[int, ...]) -> tuple[int, int] | None:
    """Return the length of a tensor's runs and the step between them; None: they are irregular."""
    length, dims = 1, list(zip(shape, strides, strict=True))
    while dims and (dims[-1][0] == 1 or dims[-1][1] == length):
        length *= dims.pop()[0]
    step = distance = 0
    for size, stride in reversed(dims):
        if size == 1:
            continue
        if not stride or (step and stride != distance):
            return None
        step, distance = step or stride, stride * size
    return length, step
