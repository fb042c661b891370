"""Shards of different pipelines that overlap: what is summed across pipelines at levels 2 and 3.

Each pipeline shards a span over its own holders, cut as it likes. Between all cuts lie intervals of
a block that exactly one rank of each pipeline keeps; intervals with the same keepers are summed in
one collective.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tutti.ranks.links import Handle, Links, Then
from tutti.train.state.layout import Block, Span
from tutti.train.state.state import SpanState


@dataclass(frozen=True, slots=True)
class _Kept:
    """Elements of a block that a rank keeps, and where they lie in its shard."""

    rank: int
    start: int  # of the block's elements
    stop: int
    span: int  # index of the span in its pipeline
    shard: int  # where in the rank's shard the first of them lies


@dataclass(slots=True)
class Joint:
    """Intervals of this rank's shards that the same ranks of other pipelines keep, too."""

    ranks: tuple[int, ...]
    pieces: list[tuple[SpanState, int, int]]  # state, first and last element of its total

    def all_reduce(self, links: Links) -> Handle:
        """Sum these elements over the pipelines."""
        parts = [self._part(state)[start:stop] for state, start, stop in self.pieces]
        flat = torch.cat(parts)
        handle = links.all_reduce(self.ranks, flat)

        def put_back() -> None:
            sizes = [stop - start for _, start, stop in self.pieces]
            torch._foreach_copy_(parts, list(flat.split(sizes)))

        return Then([handle], put_back)

    @staticmethod
    def _part(state: SpanState) -> Tensor:
        assert state.total is not None, "pipelines are joined after their own reduction"
        return state.total


def _kept(spans: Sequence[Span]) -> dict[Block, list[_Kept]]:
    """Return, for each block of a pipeline's spans, who keeps which elements of it."""
    found: dict[Block, list[_Kept]] = {}
    for index, span in enumerate(spans):
        offset = 0
        for block in span.blocks:
            own = found.setdefault(block, [])
            for rank, (low, high) in zip(
                span.holders, itertools.pairwise(span.bounds), strict=True
            ):
                start, stop = max(low, offset), min(high, offset + block.size)
                if start < stop:
                    own.append(_Kept(rank, start - offset, stop - offset, index, start - low))
            offset += block.size
    return found


Cut = tuple[int, int, int]  # index of a span, first and last element of a rank's shard of it


def shared_cuts(pipelines: Sequence[Sequence[Span]], rank: int) -> dict[tuple[int, ...], list[Cut]]:
    """Return which parts of a rank's shards which ranks (one of each pipeline) keep together."""
    kept = [_kept(spans) for spans in pipelines]
    own = _pipeline_of(pipelines, rank)
    if own is None:
        return {}
    found: dict[tuple[int, ...], list[Cut]] = {}
    for block in sorted(kept[own], key=lambda b: (b.unit, b.name, b.intervals)):
        edges = sorted({e for keepers in kept for k in keepers[block] for e in (k.start, k.stop)})
        for low, high in itertools.pairwise(edges):
            keepers = [
                next(k for k in one[block] if k.start <= low and high <= k.stop) for one in kept
            ]
            mine = keepers[own]
            if mine.rank != rank:
                continue
            ranks = tuple(sorted(k.rank for k in keepers))
            first = mine.shard + low - mine.start
            found.setdefault(ranks, []).append((mine.span, first, first + high - low))
    return {ranks: found[ranks] for ranks in sorted(found)}


def _pipeline_of(pipelines: Sequence[Sequence[Span]], rank: int) -> int | None:
    """Return the pipeline in which a rank holds something; None: all of it is another's."""
    return next(
        (i for i, spans in enumerate(pipelines) if any(rank in span.holders for span in spans)),
        None,
    )


def joints(
    pipelines: Sequence[Sequence[Span]], rank: int, states: Sequence[SpanState]
) -> list[Joint]:
    """Return the sums across pipelines in which a rank takes part, in an order all agree on."""
    by_blocks = {state.span.blocks: state for state in states}
    own = _pipeline_of(pipelines, rank)
    if own is None:
        return []
    spans = pipelines[own]
    return [
        Joint(ranks, [(by_blocks[spans[index].blocks], first, last) for index, first, last in cuts])
        for ranks, cuts in shared_cuts(pipelines, rank).items()
    ]
