"""The frozen weights of a model that adapters train beside, in 8 or 4 bits (QLoRA).

They are made without memory (device "meta") and get theirs when they are read: whole rows are
rounded, then cut, so that every plan computes with the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from tutti.accelerator.quantised import QuantisedWeight, frozen, stacked
from tutti.errors import InputError
from tutti.nn.model import Model
from tutti.nn.storage import Holder, Piece

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
