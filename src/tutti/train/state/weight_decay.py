"""Which constants of the optimizer are a tensor's own: decay, rates, and whether it is a matrix.

Matrices and embeddings decay; norms, biases and other vectors do not. Tensors named by pattern have
their own rate and decay. A flat shard may hold parts of several kinds, so a step moves it in runs.
Which run an element is in follows from the blocks alone, so every plan moves it alike. Pure.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from torch import Tensor

from tutti.accelerator.reference.optimizer import AdamSettings
from tutti.models.tuning import matches
from tutti.ownership.ownership import Block

Flag = TypeVar("Flag", bound=Hashable)


def runs(
    blocks: Sequence[Block], start: int, stop: int, flag: Callable[[Block], Flag]
) -> list[tuple[Flag, int]]:
    """Return the flags of elements from `start` to `stop` of some blocks, and how many in turn."""
    parts: list[tuple[Flag, int]] = []
    offset = 0
    for block in blocks:
        size = min(stop, offset + block.size) - max(start, offset)
        if size > 0:
            parts.append((flag(block), size))
        offset += block.size
    return [
        (value, sum(size for _, size in group))
        for value, group in itertools.groupby(parts, key=lambda part: part[0])
    ]


def by_settings(
    lists: Sequence[Sequence[Tensor] | None],
    blocks: Sequence[Block],
    kept: slice | None,
    settings: AdamSettings,
    is_matrix: Callable[[Block], bool] = lambda _: False,
) -> Iterator[tuple[AdamSettings, bool, Sequence[Sequence[Tensor] | None]]]:
    """Yield constants, whether they are of Muon's matrices, and the tensors that move by them.

    The lists go along: a tensor of each for every block, or, with `kept`, a flat one of these
    elements of all blocks. All at once where it makes no difference.
    """
    patterns = tuple(own.match for own in settings.tensors)

    def flag(block: Block) -> tuple[int | None, bool, bool]:
        special = _special(patterns, block.unit, block.name) if patterns else None
        return special, block.decays or settings.decay_vectors, is_matrix(block)

    flags = [flag(block) for block in blocks]
    if len(set(flags)) == 1:
        yield _settings(settings, *flags[0][:2]), flags[0][2], lists
        return
    if kept is not None:
        stretches = runs(blocks, kept.start, kept.stop, flag)
        flags = [own for own, _ in stretches]
        sizes = [size for _, size in stretches]
        lists = [None if own is None else own[0].split(sizes) for own in lists]
    for wanted in dict.fromkeys(flags):
        chosen = [i for i, own in enumerate(flags) if own == wanted]
        own_lists = [None if each is None else [each[i] for i in chosen] for each in lists]
        yield _settings(settings, *wanted[:2]), wanted[2], own_lists


@functools.lru_cache(maxsize=65536)
def _special(patterns: tuple[tuple[str, ...], ...], unit: int, name: str) -> int | None:
    """Return the first pattern that a tensor matches."""
    return next((i for i, own in enumerate(patterns) if matches(f"{unit}.{name}", own)), None)


def _settings(settings: AdamSettings, special: int | None, decays: bool) -> AdamSettings:
    """Return the constants of one kind of tensors."""
    decay, rate = settings.weight_decay if decays else 0.0, settings.learning_rate
    if special is not None:
        own = settings.tensors[special]
        rate *= own.rate
        decay = decay if own.weight_decay is None else own.weight_decay
    return replace(settings, learning_rate=rate, weight_decay=decay, tensors=())
