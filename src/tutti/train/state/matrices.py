"""Muon: the momentum of a whole matrix is made orthogonal, wherever its parts are kept.

Each rank keeps the momentum of its own elements. When the step's sums are known, the ranks that
hold a unit put each of its matrices together (everybody adds what only they keep, and zeros), make
it orthogonal alike, and take their part of the result as the direction of the coming step. So every
plan moves weights as one process does. Norms, biases, tables, the head and routers move by AdamW.

Source: Jordan et al. 2024; the scale is Moonshot's (Liu et al. 2025), so that learning rates are
AdamW's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tutti.accelerator.reference.optimizer import AdamSettings, orthogonal, put
from tutti.errors import InputError
from tutti.models.parameters import Parameter
from tutti.ownership.ownership import Block
from tutti.ranks.links import Links
from tutti.ranks.rank_places import Seat, Seats
from tutti.train.state.matrix_rule import matrix_ranks
from tutti.train.state.state import SpanState

SCALE = 0.2  # of an orthogonal matrix, times √ of its longer side: as large as AdamW's steps


@dataclass(frozen=True, slots=True)
class _Part:
    """A block of a matrix in a span of this rank."""

    state: SpanState
    block: Block
    offset: int  # of the block in the span

    @property
    def kept(self) -> tuple[int, int]:
        """The elements of the block that are kept here."""
        return self._within(self.state.kept)

    @property
    def own(self) -> tuple[int, int]:
        """Those of them that no other rank speaks for."""
        return self._within(self.state.span.own(self.state.rank))

    def _within(self, elements: slice) -> tuple[int, int]:
        low, high = elements.start - self.offset, elements.stop - self.offset
        return max(0, low), max(max(0, low), min(self.block.size, high))

    def of(self, flat: Tensor, low: int, high: int) -> Tensor:
        """Return some of the block's elements out of what is kept."""
        start = self.offset - self.state.kept.start
        return flat[start + low : start + high]


def matrices_of(seats: Seats, seat: Seat, states: Iterable[SpanState]) -> Matrices | None:
    """Return the matrices of a rank, if the job's optimizer asks for them."""
    if seats.plan.job.optimizer != "muon":
        return None
    return Matrices(seats, seat.place.pipeline, states)


class Matrices:
    """The matrices of a rank's units, in the order in which all ranks come to them."""

    def __init__(self, seats: Seats, pipeline: int, states: Iterable[SpanState]) -> None:
        self._seats, self._pipeline = seats, pipeline
        self._parts: dict[tuple[int, str], list[_Part]] = {}
        for state in states:
            for part, parameter in _blocks(state):
                if parameter.is_matrix:
                    if state.optimizer.homes:
                        raise InputError(
                            "plan: muon asks for the momentum before the step, but unit "
                            f"{part.block.unit} keeps it on the host; plan without offload"
                        )
                    key = (part.block.unit, part.block.name)
                    self._parts.setdefault(key, []).append(part)
        self._shapes = {
            key: next(p.shape for p in seats.spec.parameters(key[0]) if p.name == key[1])
            for key in self._parts
        }

    @torch.no_grad()
    def set_directions(self, links: Links, settings: AdamSettings, factor: Tensor) -> None:
        """Take the gradients into the momentum, and find where the coming step leads."""
        states = {id(part.state): part.state for parts in self._parts.values() for part in parts}
        ahead = {key: _momentum(state, settings, factor) for key, state in states.items()}
        for key, state in states.items():
            state.direction = torch.zeros_like(ahead[key])
        for (unit, name), parts in sorted(self._parts.items()):
            shape = self._shapes[unit, name]
            whole = self._whole(unit, shape, parts, ahead, links)
            rows = sorted({part.block.intervals[0] for part in parts}) if len(shape) > 2 else []
            first, last = (rows[0][0], rows[-1][1]) if rows else (0, len(whole))
            mine = whole[first:last]  # of experts only those that are here
            scale = SCALE * max(shape[-2:]) ** 0.5
            whole[first:last] = scale * orthogonal(mine.nan_to_num())
            for part in parts:
                low, high = part.kept
                values = whole[tuple(slice(*i) for i in part.block.intervals)].reshape(-1)
                assert part.state.direction is not None
                part.of(part.state.direction, low, high).copy_(values[low:high])

    def _whole(
        self,
        unit: int,
        shape: tuple[int, ...],
        parts: list[_Part],
        ahead: dict[int, Tensor],
        links: Links,
    ) -> Tensor:
        """Return a tensor put together from all ranks' parts of it."""
        first = parts[0]
        whole = ahead[id(first.state)].new_zeros(shape)
        alone = first.state.level == 0 and first.block.size == whole.numel()
        for part in parts:
            low, high = part.kept if alone else part.own
            if not alone and part.state.level >= 2 and self._pipeline:
                continue  # the first pipeline speaks for all
            flat = whole.new_zeros(part.block.size)
            flat[low:high] = part.of(ahead[id(part.state)], low, high)
            whole[tuple(slice(*i) for i in part.block.intervals)] = flat.view(part.block.shape)
        ranks = matrix_ranks(self._seats, unit)
        if not alone and len(ranks) > 1:
            links.all_reduce(ranks, whole).wait()
        return whole


def _blocks(state: SpanState) -> Iterator[tuple[_Part, Parameter]]:
    offset = 0
    for block, parameter in zip(state.span.blocks, state.parameters, strict=True):
        if not state.span.copied:
            yield _Part(state, block, offset), parameter
        offset += block.size


def _momentum(state: SpanState, settings: AdamSettings, factor: Tensor) -> Tensor:
    """Move a span's momentum; return it with Nesterov's look ahead. AdamW's elements go along."""
    mean = state.optimizer.mean
    assert mean is not None
    wide = torch.promote_types(mean.dtype, torch.float32)
    gradient = state.final_gradients().to(wide) * factor
    moved = torch.lerp(mean.to(wide), gradient, 1.0 - settings.momentum)
    chosen = state.matrix_elements
    put(mean, torch.where(chosen, moved, mean.to(wide)), ~factor.isnan())
    return torch.lerp(gradient, moved, settings.momentum)
