"""A call of an operator as data, and the tensors that it becomes on a device.

A `Case` holds `Values` and `Integers` where the call has tensors, at any depth. They are drawn once
in float64, from a seed that the case's name gives, and rounded to the dtype under test; the
reference gets the rounded values in float64, the implementation gets them on its device, in the
layout that the case asks for.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from tutti.accelerator.conformance.tolerance import wide

# sliced: the left part of wider rows; heads: some heads of more; transposed: columns are dense
Layout = Literal["contiguous", "sliced", "heads", "transposed"]


@dataclass(frozen=True, slots=True)
class Values:
    """A floating-point tensor of normal deviates."""

    shape: tuple[int, ...]
    scale: float = 1.0
    layout: Layout = "contiguous"
    trained: bool = True  # gets a gradient
    wide: bool = False  # float32 at least, whatever the dtype under test
    positive: bool = False
    distinct: bool = False  # no two alike along the last dimension, in any dtype
    zero_rows: bool = False  # the first half of the rows is zero


@dataclass(frozen=True, slots=True)
class Integers:
    """An integer tensor, given or drawn from [low, high); or given numbers in float32."""

    given: tuple[float, ...] | None = None
    shape: tuple[int, ...] = ()
    low: int = 0
    high: int = 0
    real: bool = False
    narrow: torch.dtype | None = None  # of 8 bits, instead of 64


@dataclass(frozen=True, slots=True)
class Case:
    """One call of an operator."""

    operator: str
    name: str
    arguments: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    terms: int = 1  # of the longest sum, forward or backward
    later: bool = False  # with weight gradients left for later
    summed: bool = False  # and added to sums in float32
    in_place: bool = False  # the arguments are the result


Numbers = dict[int, Tensor]  # what was drawn, by the place of its `Values` or `Integers`


def leaves(value: Any) -> list[Values | Integers]:
    """Return the tensors of a call, in order."""
    if isinstance(value, Values | Integers):
        return [value]
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        return [leaf for item in value for leaf in leaves(item)]
    return []


def replaced(value: Any, place: Callable[[Values | Integers], Tensor]) -> Any:
    """Return a call with its tensors in place, visited in the order of `leaves`."""
    if isinstance(value, Values | Integers):
        return place(value)
    if isinstance(value, Mapping):
        return {key: replaced(item, place) for key, item in value.items()}
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        return type(value)(replaced(item, place) for item in value)
    return value


def drawn(case: Case, dtype: torch.dtype) -> list[Tensor]:
    """Return the numbers of a case on the host, rounded to the dtype they will have."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{case.operator} {case.name}".encode()))
    numbers = []
    for leaf in leaves((case.arguments, case.options)):
        if isinstance(leaf, Integers):
            numbers.append(_integers(leaf, generator))
        else:
            own = wide(dtype) if leaf.wide else dtype
            numbers.append(_floats(leaf, generator).to(own))
    return numbers


def _integers(leaf: Integers, generator: torch.Generator) -> Tensor:
    if leaf.given is not None:
        kind = torch.float32 if leaf.real else torch.int64
        return torch.tensor(leaf.given, dtype=kind).reshape(leaf.shape or (-1,))
    numbers = torch.randint(leaf.low, leaf.high, leaf.shape, generator=generator)
    return numbers if leaf.narrow is None else numbers.to(leaf.narrow)


def _floats(leaf: Values, generator: torch.Generator) -> Tensor:
    if leaf.distinct:  # multiples of 1/32 between −4 and 4, which bfloat16 holds exactly
        rows = torch.Size(leaf.shape[:-1]).numel()
        picked = [torch.randperm(256, generator=generator)[: leaf.shape[-1]] for _ in range(rows)]
        grid = torch.stack(picked) if picked else torch.empty(0, leaf.shape[-1])
        return (grid.double() / 32 - 4).reshape(leaf.shape)
    numbers = torch.randn(leaf.shape, generator=generator, dtype=torch.float64) * leaf.scale
    if leaf.zero_rows:
        numbers[: (leaf.shape[0] + 1) // 2] = 0
    return numbers.abs() if leaf.positive else numbers


def laid_out(tensor: Tensor, layout: Layout) -> Tensor:
    """Return the same numbers in another layout in memory."""
    match layout:
        case "contiguous":
            return tensor.contiguous()
        case "sliced":
            room = tensor.new_zeros((*tensor.shape[:-1], tensor.shape[-1] + 3))
            room[..., : tensor.shape[-1]] = tensor
            return room[..., : tensor.shape[-1]]
        case "heads":
            room = tensor.new_zeros((*tensor.shape[:-2], tensor.shape[-2] + 2, tensor.shape[-1]))
            room[..., 1:-1, :] = tensor
            return room[..., 1:-1, :]
        case "transposed":
            return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
