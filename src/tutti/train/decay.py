"""Which weights decay: matrices and embeddings; norms, biases and other vectors do not. Pure.

A flat shard may hold parts of both, so a step moves it in runs. Which run an element is in follows
from the blocks alone, so every plan moves it alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from torch import Tensor

from tutti.train.layout import Block


def runs(blocks: Sequence[Block], start: int, stop: int) -> list[tuple[bool, int]]:
    """Return whether elements from `start` to `stop` of some blocks decay, and how many in turn."""
    parts: list[tuple[bool, int]] = []
    offset = 0
    for block in blocks:
        size = min(stop, offset + block.size) - max(start, offset)
        if size > 0:
            parts.append((block.decays, size))
        offset += block.size
    return [
        (decays, sum(size for _, size in group))
        for decays, group in itertools.groupby(parts, key=lambda part: part[0])
    ]


def split(
    flags: Sequence[bool], *lists: Sequence[Tensor] | None
) -> Iterator[tuple[bool, list[list[Tensor] | None]]]:
    """Yield the tensors that decay, and those that do not, of lists that go along."""
    for wanted in (True, False):
        chosen = [i for i, decays in enumerate(flags) if decays is wanted]
        if chosen:
            yield wanted, [None if own is None else [own[i] for i in chosen] for own in lists]
