"""Tied weights whose two ends lie on different ranks.

The owner's end is the weight; the other ends are copies. Before the norm is taken, the copies'
gradients go to whoever keeps the owner's; after the step, the owner's new weights come back. Tied
tensors are cut by rows only, so each part is an interval of the flat tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from tutti.ownership.ownership import Block, Name, Span
from tutti.ranks.links import Handle, Links, Then
from tutti.train.state.state import SpanState


@dataclass(frozen=True, slots=True)
class Keeper:
    """A rank's elements of one end: an interval of the tensor, from `offset` in a span."""

    end: Name
    rank: int
    pipeline: int
    start: int
    stop: int
    offset: int  # in the rank's total


@dataclass(frozen=True, slots=True)
class Route:
    """Elements that go from one rank's end to another's."""

    source: Keeper
    target: Keeper
    start: int
    stop: int


def keepers(
    spans: Sequence[Span], name: Name, level: int, width: int, pipelines: Sequence[int]
) -> Iterator[Keeper]:
    """Yield who keeps which elements of a tensor; `pipelines` by rank."""
    for span in spans:
        offset = 0
        for block in span.blocks:
            if (block.unit, block.name) == name:
                yield from _of_block(span, block, offset, level, width, pipelines)
            offset += block.size


def _of_block(
    span: Span, block: Block, offset: int, level: int, width: int, pipelines: Sequence[int]
) -> Iterator[Keeper]:
    first = block.intervals[0][0] * width
    bounds = itertools.pairwise(span.bounds)
    for rank, (low, high) in zip(span.holders, bounds, strict=True):
        if level == 0:
            low, high = 0, span.size
        start, stop = max(low, offset), min(high, offset + block.size)
        if start < stop:
            yield Keeper(
                (block.unit, block.name),
                rank,
                pipelines[rank],
                first + start - offset,
                first + stop - offset,
                start - low,
            )


def routes(sources: Sequence[Keeper], targets: Sequence[Keeper]) -> Iterator[Route]:
    """Give every target each of its elements from one source, of its own pipeline if possible."""
    for index, target in enumerate(targets):
        near = [s for s in sources if s.pipeline == target.pipeline] or list(sources)
        for low, high in _pieces(near, target.start, target.stop):
            able = [s for s in near if s.start <= low and high <= s.stop]
            if able:
                yield Route(able[index % len(able)], target, low, high)
                continue
            for start, stop in _pieces(sources, low, high):  # kept in other pipelines only
                able = [s for s in sources if s.start <= start and stop <= s.stop]
                yield Route(able[index % len(able)], target, start, stop)


def _pieces(sources: Sequence[Keeper], low: int, high: int) -> Iterator[tuple[int, int]]:
    """Yield the elements from `low` to `high`, cut wherever a source begins or ends."""
    edges = {e for s in sources for e in (s.start, s.stop) if low < e < high}
    return itertools.pairwise(sorted(edges | {low, high}))


class TiedEnds:
    """What one rank sends and receives for its ends of the tied weights."""

    def __init__(
        self,
        rank: int,
        owner: Sequence[Keeper],
        copies: Sequence[Sequence[Keeper]],
        states: dict[Keeper, SpanState],
    ) -> None:
        self._rank, self._states = rank, states
        self._own_copies = [k for ends in copies for k in ends if k.rank == rank]
        self._up = [route for ends in copies for route in routes(ends, owner)]
        self._down = [route for ends in copies for route in routes(owner, ends)]

    def sync_gradients(self, links: Links) -> Handle:
        """Add the copies' gradients to the owner's, and forget them."""
        arriving: list[tuple[Route, Tensor]] = []

        def finish() -> None:
            for route, part in arriving:
                self._part(route.target, route.start, route.stop).add_(part)

        handle = self._exchange(links, self._up, arriving, "tied gradients")
        for keeper in self._own_copies:
            self._part(keeper, keeper.start, keeper.stop).zero_()
        return Then([handle], finish)

    def sync_parameters(self, links: Links) -> Handle:
        """Overwrite the copies with the owner's new weights."""
        arriving: list[tuple[Route, Tensor]] = []

        def finish() -> None:
            for route, part in arriving:
                keeper = route.target
                first = keeper.offset + route.start - keeper.start
                self._states[keeper].write_kept(first, part)

        return Then(
            [self._exchange(links, self._down, arriving, "tied parameters", weights=True)], finish
        )

    def _part(self, keeper: Keeper, start: int, stop: int) -> Tensor:
        total = self._states[keeper].total
        assert total is not None, "tied weights are joined after the reduction"
        first = keeper.offset + start - keeper.start
        return total[first : first + stop - start]

    def _exchange(
        self,
        links: Links,
        every: Sequence[Route],
        arriving: list[tuple[Route, Tensor]],
        channel: str,
        *,
        weights: bool = False,
    ) -> Handle:
        sends: list[tuple[int, Tensor]] = []
        receives: list[tuple[int, Tensor]] = []
        for route in every:
            here = self._rank in (route.source.rank, route.target.rank)
            if not here:
                continue
            part: Tensor | None = None
            if route.source.rank == self._rank:
                part = self._read(route, weights=weights)
            if route.target.rank == self._rank:
                if part is None:
                    like = self._states[route.target].like(weights=weights)
                    buffer = like.new_empty(route.stop - route.start)
                    receives.append((route.source.rank, buffer))
                    arriving.append((route, buffer))
                else:
                    arriving.append((route, part.clone()))
            elif part is not None:
                sends.append((route.target.rank, part.clone()))
        return links.exchange(sends, receives, channel)

    def _read(self, route: Route, *, weights: bool) -> Tensor:
        keeper = route.source
        if not weights:
            return self._part(keeper, route.start, route.stop)
        first = keeper.offset + route.start - keeper.start
        state = self._states[keeper]
        kept = state.read_kept(first, first + route.stop - route.start)
        return kept.to(state.like(weights=True).dtype)
