"""Many LoRA adapters on one model: each token's row goes through its own.

A layer that some adapter adds to has room for all of them: A of all slots one behind the other, B
likewise. Of layers that are one product (query, key, value) the ranks stand side by side, each B in
the outputs of its own. The room is made when the first adapter needs it and stays: slots change
what is in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from tutti.accelerator.operators import Operators
from tutti.errors import InputError
from tutti.nn.linear import Linear
from tutti.nn.model import Model
from tutti.nn.storage import Piece


class Factors(Protocol):
    """What an adapter adds to a tensor: up · down."""

    @property
    def down(self) -> Tensor:
        """(rank, in)."""

    @property
    def up(self) -> Tensor:
        """(out, rank), scaled."""


class Slots:
    """Room for adapters on a model, and which of them each row of a step uses."""

    def __init__(self, model: Model, *, slots: int, rank: int) -> None:
        self.slots, self.rank = slots, rank
        self.rows_t: Tensor | None = None  # each token's slot, −1: none; None: nobody has one
        self.order_t: Tensor | None = None  # the tokens, those of one slot together
        self._model = model
        parallel = model.parallel
        self._whole = not parallel.sequence_parallel and parallel.overlap_chunks == 1
        self._places: dict[str, tuple[Linear, int, Piece]] = {}
        for unit, module in model.by_number().items():
            if unit == model.spec.head_unit:  # sees other rows
                continue
            for layer in module.modules():
                if isinstance(layer, Linear) and layer.adaptable:
                    for index, piece in enumerate(layer.pieces["weight"]):
                        self._places[f"{unit}.{piece.name}"] = (layer, index, piece)

    @property
    def rooms(self) -> int:
        """How many layers have room."""
        layers = {id(layer): layer for layer, _, _ in self._places.values()}
        return sum(layer.adapted is not None for layer in layers.values())

    @cached_property
    def asks_host(self) -> bool:
        """Whether the device reads the rows' slots on the host to go on."""
        some = next(self._model.parameters())
        row = torch.empty(1, 16, dtype=some.dtype, device=some.device)
        down, slots = row.new_empty(1, 16, 16), torch.zeros(1, dtype=torch.int64)
        call = self._model.operators.chosen(
            "adapted_linear", row, row, down, down, slots.to(some.device)
        )
        return call.asks_host

    @property
    def num_bytes(self) -> int:
        """What the room takes."""
        layers = {id(layer): layer.adapted for layer, _, _ in self._places.values()}
        made = (own for own in layers.values() if own is not None)
        return sum(t.numel() * t.element_size() for own in made for t in (own.down, own.up))

    def check(self, name: str, rank: int, factors: Mapping[str, Factors]) -> None:
        """Refuse an adapter that finds no place."""
        if not self._whole:
            raise InputError(
                f"adapter '{name}': a model with sequence parallelism or overlapped products takes "
                "none"
            )
        if rank > self.rank:
            raise InputError(
                f"adapter '{name}' has the rank {rank}; there is room for ranks up to {self.rank}: "
                "give a larger adapter_rank"
            )
        for logical in self._own(factors):
            if logical not in self._places:
                raise InputError(
                    f"adapter '{name}' adds to '{logical}'; tutti adapts linear layers of blocks, "
                    "no experts, embeddings, heads or up-projections of latents"
                )

    def put(self, slot: int, factors: Mapping[str, Factors]) -> None:
        """Write an adapter into a slot."""
        self.clear(slot)
        for logical, own in self._own(factors).items():
            layer, index, piece = self._places[logical]
            if layer.adapted is None:
                layer.adapted = self._room(layer)
            first, count = index * self.rank, own.down.shape[0]
            room = layer.adapted
            room.down[slot, first : first + count].copy_(own.down[:, piece.slices[1]])
            up = room.up[slot, piece.start : piece.stop, first : first + count]
            up.copy_(own.up[piece.slices[0]])

    def _own(self, factors: Mapping[str, Factors]) -> dict[str, Factors]:
        """Return what is for units that are here: others may be another stage's."""
        here = self._model.by_number()
        return {name: own for name, own in factors.items() if int(name.split(".")[0]) in here}

    def clear(self, slot: int) -> None:
        """Empty a slot."""
        for layer, _, _ in self._places.values():
            if layer.adapted is not None:
                layer.adapted.down[slot].zero_()
                layer.adapted.up[slot].zero_()

    def _room(self, layer: Linear) -> Room:
        pieces = layer.pieces["weight"]
        width, out = layer.weight.shape[1], layer.weight.shape[0]
        some = next(self._model.parameters())
        rank = self.rank * len(pieces)
        return Room(
            self,
            torch.zeros(self.slots, rank, width, dtype=some.dtype, device=some.device),
            torch.zeros(self.slots, out, rank, dtype=some.dtype, device=some.device),
        )


class Room:
    """One layer's adapters."""

    def __init__(self, slots: Slots, down: Tensor, up: Tensor) -> None:
        self.down, self.up = down, up  # (slots, R, in), (slots, out, R)
        self._slots = slots

    def added(self, operators: Operators, y: Tensor, x: Tensor) -> Tensor:
        """Return a layer's output with what the rows' adapters add."""
        rows = self._slots.rows_t
        if rows is None:
            return y
        order = self._slots.order_t
        return operators.adapted_linear(y, x, self.down, self.up, rows, order)
