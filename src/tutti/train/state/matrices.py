"""Muon: the momentum of a whole matrix is made orthogonal, wherever its parts are kept.

Each rank keeps the momentum of its own elements. When the step's sums are known, the ranks that
hold a unit put each of its matrices together (everybody adds what only they keep, and zeros), make
it orthogonal alike, and take their part of the result as the direction of the coming step. So every
plan moves weights as one process does. Norms, biases, tables, the head and routers move by AdamW.

Source: Jordan et al. 2024; the scale is Moonshot's (Liu et al. 2025), so that learning rates are
AdamW's.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from tutti.accelerator.reference.optimizer import AdamSettings, orthogonal, put
from tutti.errors import InputError
from tutti.ranks.links import Links
from tutti.ranks.rank_places import Seat, Seats
from tutti.train.state.state import SpanState
from tutti.train.state.tensor_parts import (
    WholeTensor,
    own_experts,
    speaks,
    whole_tensors,
)
from tutti.train.state.unit_ranks import unit_ranks

SCALE = 0.2  # of an orthogonal matrix, times √ of its longer side: as large as AdamW's steps


class Matrices:
    """The matrices of a rank's units, in the order in which all ranks come to them."""

    def __init__(self, seats: Seats, seat: Seat, states: Iterable[SpanState]) -> None:
        self._seats, self._pipeline = seats, seat.place.pipeline
        self._states = list(states)
        whole = whole_tensors(seats, seat, self._states)
        self._tensors = [tensor for tensor in whole if tensor.parameter.is_matrix]
        for part in (part for tensor in self._tensors for part in tensor.parts):
            if part.state.optimizer.homes:
                raise InputError(
                    "plan: muon asks for the momentum before the step, but unit "
                    f"{part.block.unit} keeps it on the host; plan without offload"
                )

    @torch.no_grad()
    def set_directions(
        self, links: Links, settings: AdamSettings, factor: Tensor, number: int
    ) -> None:
        """Take the gradients into the momentum, and find where the coming step leads."""
        del number
        states = {id(part.state): part.state for t in self._tensors for part in t.parts}
        ahead = {key: _ahead(state, settings, factor) for key, state in states.items()}
        for key, state in states.items():
            state.direction = torch.zeros_like(ahead[key])
        for tensor in self._tensors:
            parts, shape = tensor.parts, tensor.parameter.shape
            whole = self._whole(tensor, ahead, links, factor.device)
            first, last = own_experts(parts) if len(shape) > 2 else (0, len(whole))
            mine = whole[first:last]  # of experts only those that are here
            scale = SCALE * max(shape[-2:]) ** 0.5
            whole[first:last] = scale * orthogonal(mine.nan_to_num())
            for part in parts:
                low, high = part.kept
                values = whole[tuple(slice(*i) for i in part.block.intervals)].reshape(-1)
                assert part.state.direction is not None
                part.of(part.state.direction, low, high).copy_(values[low:high])
        for state in states.values():  # now that nobody can be lost any more on the way
            _take_momentum(state, settings, factor)

    def _whole(
        self, tensor: WholeTensor, ahead: dict[int, Tensor], links: Links, device: torch.device
    ) -> Tensor:
        """Return a tensor put together from all ranks' parts of it."""
        whole = torch.zeros(tensor.parameter.shape, device=device)
        for part in tensor.parts:
            low, high = part.kept if tensor.alone else part.own
            if not tensor.alone and not speaks(part, self._pipeline):
                continue
            flat = whole.new_zeros(part.block.size)
            flat[low:high] = part.of(ahead[id(part.state)], low, high)
            whole[tuple(slice(*i) for i in part.block.intervals)] = flat.view(part.block.shape)
        ranks = unit_ranks(self._seats, tensor.unit)
        if not tensor.alone and len(ranks) > 1:
            links.all_reduce(ranks, whole).wait()
        return whole


def _moved(state: SpanState, settings: AdamSettings, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return a span's gradients, and the momentum that they lead to."""
    mean = state.optimizer.mean
    assert mean is not None
    wide = torch.promote_types(mean.dtype, torch.float32)
    gradient = state.final_gradients().to(wide) * factor
    return gradient, torch.lerp(mean.to(wide), gradient, 1.0 - settings.momentum)


def _ahead(state: SpanState, settings: AdamSettings, factor: Tensor) -> Tensor:
    """Return a span's momentum after the step, with Nesterov's look ahead."""
    gradient, moved = _moved(state, settings, factor)
    return torch.lerp(gradient, moved, settings.momentum)


def _take_momentum(state: SpanState, settings: AdamSettings, factor: Tensor) -> None:
    """Move a span's momentum, that of its matrices; what AdamW moves stays as it is."""
    mean = state.optimizer.mean
    assert mean is not None
    _, moved = _moved(state, settings, factor)
    put(mean, torch.where(state.matrix_elements, moved, mean.to(moved.dtype)), ~factor.isnan())
