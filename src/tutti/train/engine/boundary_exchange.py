"""Activations and gradients at the boundaries of stages that may differ in everything.

`schedule.boundary` says who sends which rectangle of (batch, sequence) to whom, and
`schedule.boundary_rows` which rows of a rank's tokens these are. A receiving tensor-parallel group
without sequence parallelism takes slices from the wire and joins them over its own links.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tutti.nn.parallel.groups import Group, shares
from tutti.ranks.links import Handle, Links, Then
from tutti.ranks.rank_places import Seat, Seats
from tutti.schedule.boundary_rows import wire_rows
from tutti.schedule.instruction import What
from tutti.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True)
class _Piece:
    peer: int
    rows: slice | Tensor
    count: int


@dataclass(frozen=True, slots=True)
class _Wire:
    """One direction of one boundary, as this rank sees it."""

    pieces: tuple[_Piece, ...]
    num_rows: int  # of what is sent, or of what arrives before it is joined
    joined: tuple[int, ...]  # rows of each tensor-parallel rank's slice; empty: nothing to join


class Boundaries:
    """The boundaries of one rank's stage."""

    def __init__(
        self, schedule: Schedule, seats: Seats, seat: Seat, links: Links, tensor: Group
    ) -> None:
        self._schedule, self._seats, self._seat, self._links = schedule, seats, seat, links
        self._tensor = tensor
        self._wires: dict[tuple[bool, int, What], _Wire] = {}

    def send(self, x: Tensor, unit: int, what: What) -> Handle:
        """Give the stream (or its gradient) at a boundary to whoever needs it."""
        wire = self._wire(True, unit, what)
        sends = [(piece.peer, _taken(x, piece.rows)) for piece in wire.pieces]
        return self._links.exchange(sends, (), self._channel(unit, what))

    def receive(
        self, shape: tuple[int, ...], like: Tensor, unit: int, what: What
    ) -> tuple[Handle, Tensor]:
        """Return what will hold the stream (or its gradient), and a handle for when it does.

        `shape` is that of one token.
        """
        wire = self._wire(False, unit, what)
        arrived = like.new_empty((wire.num_rows, *shape))
        buffers = [
            arrived[piece.rows]
            if isinstance(piece.rows, slice)
            else like.new_empty((piece.count, *shape))
            for piece in wire.pieces
        ]
        peers = [piece.peer for piece in wire.pieces]
        handle = self._links.exchange(
            (), list(zip(peers, buffers, strict=True)), self._channel(unit, what)
        )
        whole = like.new_empty((sum(wire.joined), *shape)) if wire.joined else arrived

        def place() -> None:
            for piece, buffer in zip(wire.pieces, buffers, strict=True):
                if not isinstance(piece.rows, slice):
                    arrived[piece.rows] = buffer
            if wire.joined:
                whole.copy_(self._tensor.all_gather(arrived, wire.joined))

        return Then([handle], place), whole

    def sources(self, unit: int, what: What) -> tuple[int, ...]:
        """Return the ranks that give this one its parts of what arrives at a boundary."""
        return tuple(piece.peer for piece in self._wire(False, unit, what).pieces)

    def _channel(self, unit: int, what: What) -> str:
        """Name one direction of a boundary: both ends run its micro-batches in the same order."""
        return f"{self._seat.place.pipeline}.{unit}.{what}"

    def _wire(self, sends: bool, unit: int, what: What) -> _Wire:
        key = (sends, unit, what)
        if key not in self._wires:
            self._wires[key] = self._make(sends, unit, what)
        return self._wires[key]

    def _make(self, sends: bool, unit: int, what: What) -> _Wire:
        place = self._seat.place
        boundary = self._schedule.boundary(place.pipeline, unit, what)
        local = self._seat.rank - self._seats.map.first_rank(place.pipeline, place.stage)
        rows = wire_rows(boundary, local, sends=sends)
        stages = self._schedule.plan.pipelines[place.pipeline].stages
        other = boundary.receiver if sends else boundary.sender
        first = self._seats.map.first_rank(
            place.pipeline, next(i for i, stage in enumerate(stages) if stage is other)
        )
        pieces = tuple(
            _Piece(
                first + (transfer.receiver if sends else transfer.sender),
                at if isinstance(at, slice) else torch.from_numpy(at),
                (transfer.batch[1] - transfer.batch[0])
                * (transfer.sequence[1] - transfer.sequence[0]),
            )
            for transfer, at in zip(rows.transfers, rows.places, strict=True)
        )
        joined = shares(rows.whole, self._seat.replica.tp) if rows.whole else ()
        return _Wire(pieces, rows.count, joined)


def _taken(x: Tensor, rows: slice | Tensor) -> Tensor:
    return x[rows].contiguous()
