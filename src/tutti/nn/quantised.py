"""Loads a model whose weights are held in 8 or 4 bits: as a folder has them, or rounded here.

The model is made without memory (device "meta"); each weight gets its own when it is read, so that
no wide copy of the model is ever there. Embeddings, norms, routers, biases, and what is not a
product of its own stay wide, and the head too, unless the folder has it quantised.

`fill_narrow` does so for the frozen weights that adapters train beside (QLoRA): whole rows are
rounded, then cut, so that every plan computes with the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tutti.accelerator.quantised import KINDS, QuantisedWeight, frozen, joined, quantise, stacked
from tutti.errors import InputError, hint
from tutti.nn.experts import ExpertMlp
from tutti.nn.linear import Linear
from tutti.nn.load import Checkpoint
from tutti.nn.model import Model
from tutti.nn.storage import Holder, Piece

LEAST = 16  # outputs: a gate's single row is no weight to speak of


class QuantisedCheckpoint(Checkpoint, Protocol):
    """A checkpoint of which some tensors are quantised (`tutti.huggingface.quantised`)."""

    def quantised(self, name: str) -> Sequence[Any] | None:
        """Return stored weights with the rows of them that make up a tensor; None: plain."""


@torch.no_grad()
def load_quantised(
    model: Model,
    checkpoint: Checkpoint | QuantisedCheckpoint,
    device: torch.device,
    kind: str | None = None,
) -> None:
    """Fill a model that was made on "meta"; `kind` rounds plain weights to fp8, int8 or int4."""
    if kind is not None and kind not in KINDS:
        raise InputError(f"weights is '{kind}'; {hint(kind, KINDS)}")
    loader = _Loader(model, checkpoint, device, kind)
    for name, unit in model.units.items():
        for holder in unit.modules():
            if isinstance(holder, Holder):
                for attribute in tuple(holder.pieces):
                    loader.fill(holder, attribute, name)


def narrow_inputs(model: Model) -> None:
    """Let the rows that are multiplied with weights of 8-bit floats be rounded to 8 bits, too."""
    count = 0
    for module in model.modules():
        weight: object = module.weight if isinstance(module, Linear) else None
        if isinstance(weight, QuantisedWeight) and weight.kind == "fp8":
            setattr(module, "weight", replace(weight, narrow_inputs=True, laid_out={}))  # noqa: B010
            count += 1
    if not count:
        raise InputError(
            f"{model.spec.name}: activations are rounded to fp8 beside weights in fp8 only; round "
            "those, too"
        )


def weight_bytes(model: Model) -> int:
    """Return what a model's weights take."""
    wide = sum(p.numel() * p.element_size() for p in model.parameters())
    held = (
        getattr(module, attribute)
        for module in model.modules()
        if isinstance(module, Holder)
        for attribute in module.quantisable
    )
    return wide + sum(w.num_bytes for w in held if isinstance(w, QuantisedWeight))


class _Loader:
    """Reads one parameter after the other."""

    def __init__(
        self, model: Model, checkpoint: Any, device: torch.device, kind: str | None
    ) -> None:
        self._name, self._checkpoint = model.spec.name, checkpoint
        self._device, self._kind = device, kind
        self._known = set(checkpoint.names())
        self._made: dict[int, nn.Parameter] = {}  # by the one without memory: tied ones once

    def fill(self, holder: Holder, attribute: str, unit: str) -> None:
        """Give a parameter its memory and its numbers."""
        empty = getattr(holder, attribute)
        if id(empty) in self._made:
            setattr(holder, attribute, self._made[id(empty)])
            return
        pieces = holder.pieces[attribute]
        names = [f"{unit}.{piece.name}" for piece in pieces]
        for name in names:
            if name not in self._known:
                raise InputError(f"{self._name}: the checkpoint has no tensor '{name}'")
        parts = [self._part(name, piece) for name, piece in zip(names, pieces, strict=True)]
        weight = self._narrow(holder, attribute, parts)
        if weight is not None:
            delattr(holder, attribute)
            setattr(holder, attribute, weight.to(self._device))
            return
        made = nn.Parameter(
            torch.empty(empty.shape, dtype=empty.dtype, device=self._device), requires_grad=False
        )
        for piece, part in zip(pieces, parts, strict=True):
            wide = part.dequantised(torch.float32) if isinstance(part, QuantisedWeight) else part
            piece.seen(made).copy_(wide)
        self._made[id(empty)] = made
        setattr(holder, attribute, made)

    def _part(self, name: str, piece: Piece) -> Tensor | QuantisedWeight:
        """Return this rank's slice of a tensor."""
        shape = [cut.stop - cut.start for cut in piece.slices]
        stored = getattr(self._checkpoint, "quantised", lambda _name: None)(name)
        weight: Tensor | QuantisedWeight
        if stored is None:
            weight = self._checkpoint.read(name, piece.slices)
        else:
            weight = self._cut(name, piece, stored)
        if list(weight.shape) != shape:
            raise InputError(
                f"{self._name}: tensor '{name}': expected {shape}, found {list(weight.shape)}"
            )
        return weight

    def _cut(self, name: str, piece: Piece, stored: Sequence[Any]) -> Tensor | QuantisedWeight:
        """Return a slice of stored weights; numbers where they are too unlike to be one weight."""
        rows, columns = piece.slices[-2:]
        try:
            if not piece.parameter.experts:
                parts = [_weight(part) for part in stored]
                whole = stacked(parts)
                if whole is not None:
                    return whole.part(rows, columns)
                return torch.cat([p.dequantised(torch.float32) for p in parts])[rows, columns]
            own = [_weight(part) for part in stored[piece.slices[0]]]
            weight = joined([part.part(rows, columns) for part in own])
            if weight is not None:
                return weight
            return torch.stack([p.dequantised(torch.float32) for p in own])[:, rows, columns]
        except InputError as error:
            raise InputError(f"{self._name}: tensor '{name}': {error}") from None

    def _narrow(
        self, holder: Holder, attribute: str, parts: Sequence[Tensor | QuantisedWeight]
    ) -> QuantisedWeight | None:
        """Return a weight in few bits, if it is to be held so."""
        if attribute not in holder.quantisable:
            return None
        narrow = [part for part in parts if isinstance(part, QuantisedWeight)]
        if not narrow and self._kind is not None and isinstance(holder, Linear | ExpertMlp):
            if sum(part.shape[-2] for part in parts) < LEAST:
                return None
            for part in parts:
                assert isinstance(part, Tensor)
                made = quantise(part, self._kind)
                narrow += [] if made is None else [made]
        return stacked(narrow) if len(narrow) == len(parts) else None


def _weight(part: Any) -> QuantisedWeight:
    packed = part.packed
    whole = QuantisedWeight(
        codes=packed.codes,
        scales=packed.scales,
        zeros=packed.zeros,
        block=packed.block,
        order=packed.order,
    )
    return whole if part.rows is None else whole.rows(part.rows)


# --- the frozen base of adapters (QLoRA) ------------------------------------------------------

Read = Callable[[str, Piece, tuple[slice, ...]], Tensor]
"""Returns a slice of a tensor by its name, its piece and the slices."""


def waiting(model: Model) -> Iterator[tuple[str, Holder, str]]:
    """Yield the parameters that have no memory yet: unit, module, attribute."""
    for unit, module in model.units.items():
        for holder in module.modules():
            if not isinstance(holder, Holder):
                continue
            for attribute in tuple(holder.pieces):
                stored = getattr(holder, attribute)
                if isinstance(stored, nn.Parameter) and stored.is_meta:
                    yield unit, holder, attribute


@torch.no_grad()
def fill_narrow(model: Model, read: Read, device: torch.device | None) -> None:
    """Give the frozen weights their numbers, rounded as the model's tuning says."""
    if model.spec.tuning is None or model.spec.tuning.base == "wide":
        return
    kind = model.spec.tuning.base
    for unit, holder, attribute in list(waiting(model)):
        parts = [
            _part(f"{unit}.{piece.name}", piece, read, kind, model.spec.name)
            for piece in holder.pieces[attribute]
        ]
        whole = stacked(parts)
        assert whole is not None, "weights of one input are rounded alike"
        delattr(holder, attribute)
        setattr(holder, attribute, whole if device is None else whole.to(device))


def _part(name: str, piece: Piece, read: Read, kind: str, model: str) -> QuantisedWeight:
    """Return this rank's part of a weight."""
    outer = piece.slices[:-2]  # of experts, its own
    shape = piece.parameter.shape
    whole = read(name, piece, (*outer, slice(0, shape[-2]), slice(0, shape[-1])))
    made = frozen(whole, kind)
    if made is None:
        raise InputError(
            f"{model}: '{name}' has {shape[-1]} columns; {kind} needs a multiple of 16: take "
            "base: wide"
        )
    try:
        return _finer(made, piece.slices[-1]).part(*piece.slices[-2:])
    except InputError as error:
        raise InputError(f"{model}: '{name}': {error}") from None


def _finer(weight: QuantisedWeight, columns: slice) -> QuantisedWeight:
    """Return the same numbers with groups so narrow that none is cut."""
    group = weight.block[1]
    width = math.gcd(group, columns.start, columns.stop)
    if width == group:
        return weight
    scales = weight.scales.repeat_interleave(group // width, -1)
    return replace(weight, scales=scales, block=(1, width), laid_out={})
