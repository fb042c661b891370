"""Sums across pipelines at shard levels 2 and 3, where shards of different pipelines overlap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tutti.ownership.ownership import Span
from tutti.ownership.shard_overlaps import shared_cuts
from tutti.ranks.links import Handle, Links, Then
from tutti.train.state.state import SpanState


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


def joints(
    pipelines: Sequence[Sequence[Span]], rank: int, states: Sequence[SpanState]
) -> list[Joint]:
    """Return the sums across pipelines in which a rank takes part, in an order all agree on."""
    by_blocks = {state.span.blocks: state for state in states}
    own = next((spans for spans in pipelines if any(s.is_held_by(rank) for s in spans)), ())
    return [
        Joint(ranks, [(by_blocks[own[cut.span].blocks], cut.start, cut.stop) for cut in cuts])
        for ranks, cuts in shared_cuts(pipelines, rank).items()
    ]
