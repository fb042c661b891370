"""Shards of different pipelines that overlap: what is summed across pipelines at levels 2 and 3."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tutti.models.parameters import Interval
from tutti.ownership.ownership import Block, Span


class Cut(NamedTuple):
    """Elements of a rank's shard of a span."""

    span: int  # index of the span among its pipeline's
    start: int  # in the shard
    stop: int


def shared_cuts(pipelines: Sequence[Sequence[Span]], rank: int) -> dict[tuple[int, ...], list[Cut]]:
    """Return which parts of a rank's shards which ranks, one of each pipeline, keep together.

    Each pipeline shards a span over its own holders, cut as it likes; between all cuts lie
    intervals of a block that exactly one rank of each pipeline keeps.
    """
    own = next(
        (i for i, spans in enumerate(pipelines) if any(s.is_held_by(rank) for s in spans)), None
    )
    if own is None:
        return {}
    where = [_offsets(spans) for spans in pipelines]
    cuts_of_ranks: dict[tuple[int, ...], list[Cut]] = {}
    for block in sorted(where[own], key=lambda b: (b.unit, b.name, b.intervals)):
        index, offset = where[own][block]
        mine = pipelines[own][index]
        if not mine.is_held_by(rank):
            continue
        kept = mine.own(rank)
        low, high = max(kept.start, offset), min(kept.stop, offset + block.size)
        if low >= high:
            continue
        others = [
            _of_block(pipelines[p], where[p][block], low - offset, high - offset)
            for p in range(len(pipelines))
            if p != own
        ]
        edges = {low - offset, high - offset}
        edges |= {e for keepers in others for _, ends in keepers for e in ends}
        inside = sorted(e for e in edges if low - offset <= e <= high - offset)
        for start, stop in itertools.pairwise(inside):
            keepers = {next(r for r, (a, b) in one if a <= start and stop <= b) for one in others}
            first = start + offset - kept.start
            ranks = tuple(sorted(keepers | {rank}))
            cuts_of_ranks.setdefault(ranks, []).append(Cut(index, first, first + stop - start))
    return {ranks: cuts_of_ranks[ranks] for ranks in sorted(cuts_of_ranks)}


def _offsets(spans: Iterable[Span]) -> dict[Block, tuple[int, int]]:
    """Return in which span each block lies, and from which element on."""
    offsets: dict[Block, tuple[int, int]] = {}
    for index, span in enumerate(spans):
        offset = 0
        for block in span.blocks:
            offsets[block] = (index, offset)
            offset += block.size
    return offsets


def _of_block(
    spans: Sequence[Span], place: tuple[int, int], start: int, stop: int
) -> list[tuple[int, Interval]]:
    """Return who keeps some elements of a block, as intervals of the block."""
    index, offset = place
    span = spans[index]
    return [
        (rank, (low - offset, high - offset))
        for rank, (low, high) in span.members.keepers(span.size, start + offset, stop + offset)
    ]
