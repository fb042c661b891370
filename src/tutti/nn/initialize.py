"""Random first weights that depend on the seed and on nothing else.

Every logical tensor has random numbers of its own, made in runs of rows that are each seeded by
(seed, name, run): whatever slice of it a rank holds, it makes the runs that cover the slice and
gets the numbers that any other plan would get.
"""

from __future__ import annotations

import hashlib
import math
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from tutti.models import NormSpec, Parameter, ParameterKind
from tutti.models.tuning import DOWN, is_adapter
from tutti.nn.linear import Linear
from tutti.nn.model import Model
from tutti.nn.norm import HeadNorm, Norm
from tutti.nn.quantised import fill_narrow
from tutti.nn.storage import Logical, Piece

DEVIATION = 0.02  # transformers' initializer_range
RUN_ELEMENTS = 1 << 16


@torch.no_grad()
def initialize(
    model: Model, seed: int = 0, *, deviation: float = DEVIATION, on_device: bool = False
) -> None:
    """Fill every parameter: weights normal, biases zero, norms the identity.

    With `on_device` the device draws the numbers, whatever they are: to time steps with.
    """
    offsets = {
        id(parameter): _identity(module.spec if isinstance(module, Norm) else module.spec.norm)
        for module in model.modules()
        if isinstance(module, (Norm, HeadNorm))
        for parameter in [module.weight]
        if parameter is not None
    }

    def drawn(name: str, piece: Piece, slices: tuple[slice, ...]) -> Tensor:
        if on_device:
            size = tuple(cut.stop - cut.start for cut in slices)
            return torch.empty(size, device=_device(model)).normal_(std=deviation)
        return normal(seed, name, piece.parameter, slices) * deviation

    fill_narrow(model, drawn, _device(model))
    for logical in model.logical_tensors():
        parameter, view = logical.piece.parameter, logical.view
        if id(logical.owner) in offsets:
            view.fill_(offsets[id(logical.owner)])
        elif is_adapter(parameter.name):
            view.copy_(first_factor(seed, logical))
        elif parameter.kind in (ParameterKind.BIAS, ParameterKind.NORM) or _is_fixed(parameter):
            view.zero_()
        elif on_device:
            view.normal_(std=deviation)
        else:
            name = parameter.tied_to or logical.name
            view.copy_(normal(seed, name, parameter, logical.slices) * deviation)
    begin_magnitudes(model)


def begin_magnitudes(model: Model) -> None:
    """Let DoRA's magnitudes be the lengths of the weights' rows; tensor-parallel ranks together."""
    for module in model.modules():
        if isinstance(module, Linear) and module.low_rank is not None:
            module.low_rank.begin_magnitudes(module.weight)


def _device(model: Model) -> torch.device | None:
    """Return where the model's parameters are; None: nowhere."""
    return next((p.device for p in model.parameters() if not p.is_meta), None)


def _is_fixed(parameter: Parameter) -> bool:
    """Tell whether nobody ever trains it, whatever a job freezes."""
    return not parameter.trainable and not parameter.frozen


def first_factor(seed: int, logical: Logical) -> Tensor:
    """Return this rank's slice of an adapter's factor as it begins: together they add nothing.

    `down` is uniform within ±1/√inputs, as PEFT's; magnitudes follow from the weights.
    """
    if not logical.name.endswith(DOWN):
        return torch.zeros(tuple(s.stop - s.start for s in logical.slices))
    drawn = normal(seed, logical.name, logical.piece.parameter, logical.slices)
    uniform: Tensor = torch.special.ndtr(drawn) * 2.0 - 1.0
    return uniform / math.sqrt(logical.piece.parameter.shape[-1])


def _identity(norm: NormSpec) -> float:
    return 0.0 if norm.unit_offset else 1.0


def normal(seed: int, name: str, parameter: Parameter, slices: tuple[slice, ...]) -> Tensor:
    """Return a slice of the standard normal numbers of a tensor, in float32."""
    rows, *rest = parameter.shape
    per_row = math.prod(rest)
    run = max(1, RUN_ELEMENTS // per_row)  # rows
    first, last = slices[0].start // run, -(-slices[0].stop // run)
    whole = torch.empty(slices[0].stop - slices[0].start, *(s.stop - s.start for s in slices[1:]))

    def fill(index: int) -> None:
        digest = hashlib.sha256(f"{seed}/{name}/{index}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        start, stop = index * run, min(rows, (index + 1) * run)
        made = torch.randn(stop - start, *rest, generator=generator)
        begin, end = max(slices[0].start, start), min(slices[0].stop, stop)
        inside = made[(slice(begin - start, end - start), *slices[1:])]
        whole[begin - slices[0].start : end - slices[0].start] = inside

    if last - first < 2 * torch.get_num_threads():
        for index in range(first, last):
            fill(index)
    else:  # drawing numbers leaves the interpreter free
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(fill, range(first, last)))
    return whole
