"""Which weights decay: matrices and embeddings; norms, biases and other vectors do not. Pure.

A flat shard may hold parts of both, so a step moves it in runs. Which run an element is in follows
from the blocks alone, so every plan moves it alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from tutti.accelerator.reference.optimizer import AdamSettings
from tutti.schedule.ownership import Block


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


def by_decay(
    lists: Sequence[Sequence[Tensor] | None],
    blocks: Sequence[Block],
    kept: slice | None,
    settings: AdamSettings,
) -> Iterator[tuple[AdamSettings, Sequence[Sequence[Tensor] | None]]]:
    """Yield the constants of those that decay and of those that do not, with their tensors.

    The lists go along: a tensor of each for every block, or, with `kept`, a flat one of these
    elements of all blocks. All at once where it makes no difference.
    """
    if settings.decay_vectors or not settings.weight_decay:
        yield settings, lists
        return
    flags = [block.decays for block in blocks]
    if kept is not None:
        found = runs(blocks, kept.start, kept.stop)
        flags = [decays for decays, _ in found]
        sizes = [size for _, size in found]
        lists = [None if own is None else own[0].split(sizes) for own in lists]
    for wanted in (True, False):
        chosen = [i for i, decays in enumerate(flags) if decays is wanted]
        if chosen:
            own = settings if wanted else replace(settings, weight_decay=0.0)
            yield own, [None if each is None else [each[i] for i in chosen] for each in lists]
