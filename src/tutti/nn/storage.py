"""Logical tensors in fused parameters.

A model's tensors have the names and shapes of `tutti.models.parameters`. What a rank stores is a
slice of each, and several that are multiplied with the same input stand in one parameter (query,
key and value; gate and up): one product instead of three. A `Piece` says which part of a stored
parameter is which slice of which tensor, so that weights and gradients are read and written by
their logical names whatever the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tutti.accelerator.operators import Operators
from tutti.models import Parameter
from tutti.models.tuning import AdapterSpec, is_narrowed
from tutti.nn.parallel.groups import ParallelContext, own_experts
from tutti.plan.plan import ContextKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A slice of a logical tensor as a part of a stored one."""

    name: str  # without the unit
    parameter: Parameter
    slices: tuple[slice, ...]  # of the whole logical tensor
    dim: int  # of the stored tensor along which pieces follow each other
    start: int
    stop: int
    # ranks that hold the same slice each have a part of its gradient: the sum is whole. If not,
    # each of them has all of it (for its own sequences)
    partial: bool

    def seen(self, stored: Tensor) -> Tensor:
        """Return the view of the stored tensor that is this piece."""
        return stored.narrow(self.dim, self.start, self.stop - self.start)


class Logical(NamedTuple):
    """A logical tensor of a model, as far as this rank holds it."""

    name: str  # "3.attention.query.weight"
    view: Tensor  # of the stored parameter
    slices: tuple[slice, ...]  # of the whole tensor
    piece: Piece
    owner: nn.Parameter

    @property
    def gradient(self) -> Tensor | None:
        """The part of the stored gradient that is this tensor's."""
        return None if self.owner.grad is None else self.piece.seen(self.owner.grad)


def slice_of(parameter: Parameter, parallel: ParallelContext) -> tuple[slice, ...]:
    """Return which part of a tensor a rank holds."""
    experts = None
    if parameter.experts:
        own = own_experts(parallel, parameter.experts)
        experts = (own.start, own.stop) if parallel.expert_counts else None
    tensor = parallel.tensor
    part = parameter.part(tp=tensor.size, rank=tensor.rank, experts=experts)
    return tuple(slice(*interval) for interval in part)


def is_partial(parameter: Parameter, parallel: ParallelContext) -> bool:
    """Tell whether copies of a slice must add their gradients up."""
    return parameter.is_partial(
        tp=parallel.tensor.size,
        sequence_parallel=parallel.sequence_parallel,
        spread=bool(parallel.expert_counts),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Maker:
    """What is needed to make a unit's parameters, under a prefix of their names."""

    parameters: Mapping[str, Parameter]
    parallel: ParallelContext
    operators: Operators
    dtype: torch.dtype
    device: torch.device | None
    context_kind: ContextKind = ContextKind.ALL_GATHER
    adapter: AdapterSpec | None = None
    narrow_base: bool = False  # frozen weights get their memory later, in few bits
    prefix: str = ""

    def under(self, prefix: str) -> Maker:
        """Return the maker of what is below a prefix."""
        return replace(self, prefix=f"{self.prefix}{prefix}.")

    def has(self, name: str) -> bool:
        """Tell whether the model has a tensor."""
        return self.prefix + name in self.parameters

    def width(self, name: str, dim: int = 0) -> int:
        """Return how much of a dimension of a tensor this rank holds."""
        cut = slice_of(self.parameters[self.prefix + name], self.parallel)[dim]
        return int(cut.stop - cut.start)

    def pieces(self, names: tuple[str, ...]) -> tuple[Piece, ...]:
        """Return the pieces of a parameter in which tensors stand one below the other."""
        pieces: list[Piece] = []
        start = 0
        for name in names:
            parameter = self.parameters[self.prefix + name]
            slices, dim = slice_of(parameter, self.parallel), 1 if parameter.experts else 0
            stop = start + slices[dim].stop - slices[dim].start
            pieces.append(
                Piece(
                    name=self.prefix + name,
                    parameter=parameter,
                    slices=slices,
                    dim=dim,
                    start=start,
                    stop=stop,
                    partial=is_partial(parameter, self.parallel),
                )
            )
            start = stop
        return tuple(pieces)

    def empty(self, pieces: tuple[Piece, ...]) -> nn.Parameter:
        """Return the parameter that holds the pieces, its numbers yet to be set."""
        first = pieces[0]
        shape = [cut.stop - cut.start for cut in first.slices]
        shape[first.dim] = pieces[-1].stop
        trained = any(piece.parameter.trainable for piece in pieces)
        # a router's correction is added up in small steps, which half precision would lose
        plain = trained or first.parameter.frozen
        dtype = self.dtype if plain else torch.promote_types(self.dtype, torch.float32)
        later = self.narrow_base and all(is_narrowed(piece.parameter) for piece in pieces)
        tensor = torch.empty(shape, dtype=dtype, device="meta" if later else self.device)
        return nn.Parameter(tensor, requires_grad=trained)


class Holder(nn.Module):
    """A module whose own parameters are made of logical tensors."""

    quantisable: tuple[str, ...] = ()  # weights that `nn.quantised` may hold in fewer bits

    def __init__(self) -> None:
        super().__init__()
        self.pieces: dict[str, tuple[Piece, ...]] = {}

    def hold(self, attribute: str, make: Maker, *names: str) -> None:
        """Give the module a parameter of these tensors; None if the model has none of them."""
        if not make.has(names[0]):
            self.register_parameter(attribute, None)
            return
        self.pieces[attribute] = make.pieces(names)
        self.register_parameter(attribute, make.empty(self.pieces[attribute]))


def logical_tensors(module: nn.Module, unit: int) -> Iterator[Logical]:
    """Yield the logical tensors in a module, each of them once; `unit` goes before their names."""
    seen: set[int] = set()
    for holder in module.modules():
        if not isinstance(holder, Holder):
            continue
        for attribute, pieces in holder.pieces.items():
            stored = getattr(holder, attribute)
            if id(stored) in seen or not isinstance(stored, nn.Parameter):  # quantised
                continue
            seen.add(id(stored))
            for piece in pieces:
                view = piece.seen(stored.detach())
                yield Logical(f"{unit}.{piece.name}", view, piece.slices, piece, stored)
