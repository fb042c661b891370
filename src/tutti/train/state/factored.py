"""Adafactor: the squares of a matrix' gradients are known by their means over rows and columns.

Each rank adds up the squares of the elements that only it keeps; the ranks that hold a unit join
these sums, and all of them keep the means of the whole tensors: a number for each row and column.
A second, smaller sum tells how large each tensor's step would be, which bounds it. The step itself
is made of a gradient and these means when the optimizer comes to it, so that nothing of a tensor's
size is kept. Vectors have a mean for each element. Of stacked experts, each has its own rows and
columns, a rank those of its own experts; the bound is of the tensor, as of all others.

Source: Shazeer and Stern 2018, algorithms 4 and 5, with the learning rate that the job gives: no
relative steps, no first moment.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tutti.accelerator.reference.optimizer import AdamSettings, put
from tutti.models.parameters import Parameter
from tutti.ownership.rectangles import rectangles
from tutti.plan.factored_means import mean_shapes
from tutti.ranks.links import Handle, Links
from tutti.ranks.rank_places import Seat, Seats
from tutti.train.state.state import SpanState
from tutti.train.state.tensor_parts import (
    TensorPart,
    WholeTensor,
    own_experts,
    speaks,
    whole_tensors,
)
from tutti.train.state.unit_ranks import unit_ranks

DECAY = -0.8  # power of the step's number: how much of a mean is new
LEAST = 1e-30  # added to squares
CLIP = 1.0  # the root mean square that a tensor's step has at most, times the learning rate


@dataclass(frozen=True, slots=True)
class FactoredTensor:
    """A tensor's means of squares, and the parts of it that are updated here."""

    unit: int
    parameter: Parameter
    parts: tuple[TensorPart, ...]
    first: int  # of stacked experts, those that are here; of other tensors all rows
    last: int
    means: dict[str, Tensor]  # "row" and "column", or "square"
    alone: bool  # all gradients are here

    @classmethod
    def of(cls, whole: WholeTensor, device: torch.device) -> FactoredTensor:
        """Return a tensor before its first step."""
        parts, shape = whole.parts, whole.parameter.shape
        first, last = own_experts(parts) if len(shape) > 2 else (0, shape[0])
        here = (last - first, *shape[1:])
        means = {name: torch.zeros(s, device=device) for name, s in mean_shapes(here).items()}
        return cls(whole.unit, whole.parameter, parts, first, last, means, whole.alone)

    def counted(self, pipeline: int) -> Iterator[tuple[TensorPart, int, int]]:
        """Yield the elements that this rank's sums are of: over all ranks, each once."""
        for part in self.parts:
            low, high = part.kept if self.alone else part.own
            if low < high and (self.alone or speaks(part, pipeline)):
                yield part, low, high

    def written(self, pipeline: int) -> Iterator[tuple[int, int]]:
        """Yield the stacked matrices (or all) whose means this rank writes: nobody else does.

        The first holder of their first element writes them.
        """
        for part in self.parts:
            intervals, state = part.block.intervals, part.state
            begins = [start for start, _ in intervals[len(intervals) > 2 :]]
            if not any(begins) and speaks(part, pipeline) and state.rank == state.span.holders[0]:
                yield intervals[0] if len(intervals) > 2 else (self.first, self.last)

    def factors(self, times: Tensor) -> dict[str, Tensor]:
        """Return what the gradient of an element is multiplied with, by its row and column."""
        if "square" in self.means:
            return {"square": self.means["square"].rsqrt() * times}
        row, column = self.means["row"], self.means["column"]
        relative = row / row.mean(-1, keepdim=True)
        return {"row": (relative.rsqrt() * times).unsqueeze(-1), "column": column.rsqrt()}

    def boxes(self, part: TensorPart, low: int, high: int) -> Iterator[_Box]:
        """Yield some elements of a part as boxes of the tensor."""
        for first, box in rectangles(part.block.shape, low, high):
            starts = [start for start, _ in part.block.intervals]
            at = [
                slice(base + offset, base + offset + size)
                for base, offset, size in zip(starts, box.offsets, box.sizes, strict=True)
            ]
            here = (slice(at[0].start - self.first, at[0].stop - self.first), *at[1:])
            elements = slice(first - low, first - low + box.count)
            yield _Box(elements, box.sizes, tuple(at), here)


class _Box(NamedTuple):
    """Elements that are a box of a tensor."""

    elements: slice  # of those that were asked for
    sizes: tuple[int, ...]
    at: tuple[slice, ...]  # in the whole tensor
    here: tuple[slice, ...]  # in what is here of stacked ones

    def of(self, flat: Tensor) -> Tensor:
        """Return the box of a vector of what was asked for."""
        return flat[self.elements].view(self.sizes)


class Factored:
    """The tensors of a rank's units whose squares are known by rows and columns."""

    def __init__(self, seats: Seats, seat: Seat, states: Iterable[SpanState]) -> None:
        self._seats, self._pipeline = seats, seat.place.pipeline
        states = list(states)
        self.tensors = [
            FactoredTensor.of(whole, states[0].device)
            for whole in whole_tensors(seats, seat, states)
        ]
        self._bounds: dict[int, Tensor] = {}  # by tensor, of the coming step
        for state in states:
            here = [(t, [part for part in t.parts if part.state is state]) for t in self.tensors]
            if own := [(tensor, parts) for tensor, parts in here if parts]:
                state.directed = functools.partial(self._directed, own)

    @torch.no_grad()
    def set_directions(
        self, links: Links, settings: AdamSettings, factor: Tensor, number: int
    ) -> None:
        """Take the gradients into the means, and find how far the coming step is held back."""
        del settings
        sums = [self._squares(tensor, factor) for tensor in self.tensors]
        self._join(links, sums)
        new = float(number) ** DECAY
        before = [{name: mean.clone() for name, mean in t.means.items()} for t in self.tensors]
        for tensor, own in zip(self.tensors, sums, strict=True):
            _take(tensor, own, new, factor)
        steps = [[self._step_square(tensor, factor)] for tensor in self.tensors]
        try:
            self._join(links, steps)
        except BaseException:
            for tensor, means in zip(self.tensors, before, strict=True):
                for name, mean in means.items():
                    tensor.means[name].copy_(mean)
            raise
        self._bounds = {
            id(tensor): (square / tensor.parameter.size).sqrt().div_(CLIP).clamp_min_(1.0)
            for tensor, (square,) in zip(self.tensors, steps, strict=True)
        }

    def _squares(self, tensor: FactoredTensor, factor: Tensor) -> list[Tensor]:
        """Return the sums of squares that this rank adds: by row and column, or by element."""
        shapes = mean_shapes(tensor.parameter.shape)
        sums = {name: torch.zeros(own, device=factor.device) for name, own in shapes.items()}
        for part, low, high in tensor.counted(self._pipeline):
            gradient = _gradient(part, low, high, factor)
            for box in tensor.boxes(part, low, high):
                values = box.of(gradient)
                if "square" in sums:
                    sums["square"][box.at] += values.float().square()
                    continue
                *outer, rows, columns = box.at
                sums["row"][(*outer, rows)] += _squared(values, -1)
                sums["column"][(*outer, columns)] += _squared(values, -2)
        return [own.mul_(factor.square()) for own in sums.values()]

    def _step_square(self, tensor: FactoredTensor, factor: Tensor) -> Tensor:
        """Return the sum of squares of the step of the elements that this rank speaks for."""
        total, factors = torch.zeros((), device=factor.device), tensor.factors(factor)
        for part, low, high in tensor.counted(self._pipeline):
            gradient = _gradient(part, low, high, factor)
            for box in tensor.boxes(part, low, high):
                values = box.of(gradient)
                if "square" in factors:
                    total += (values * factors["square"][box.here]).square().sum()
                    continue
                *outer, rows, columns = box.here
                scaled = _squared(values * _as_row(factors["column"][(*outer, columns)]), -1)
                total += (scaled * factors["row"][(*outer, rows)].squeeze(-1).square()).sum()
        return total

    def _join(self, links: Links, sums: list[list[Tensor]]) -> None:
        """Add to the sums of tensors, in place, those of other ranks; one message a unit."""
        waiting: list[tuple[list[Tensor], Tensor, Handle]] = []
        units = dict.fromkeys(tensor.unit for tensor in self.tensors)
        for unit in units:
            ranks = unit_ranks(self._seats, unit)
            shared = [
                each
                for tensor, own in zip(self.tensors, sums, strict=True)
                if tensor.unit == unit and not tensor.alone
                for each in own
            ]
            if shared and len(ranks) > 1:
                flat = torch.cat([each.reshape(-1) for each in shared])
                waiting.append((shared, flat, links.all_reduce(ranks, flat)))
        for shared, flat, handle in waiting:
            handle.wait()
            parts = flat.split([each.numel() for each in shared])
            for each, part in zip(shared, parts, strict=True):
                each.copy_(part.view(each.shape))

    @torch.no_grad()
    def _directed(
        self,
        own: list[tuple[FactoredTensor, list[TensorPart]]],
        gradients: list[Tensor],
        factor: Tensor,
    ) -> list[Tensor]:
        """Return the step of a span, which learning rates multiply, in its gradients' form."""
        sizes = [gradient.numel() for gradient in gradients]
        whole = torch.empty(sum(sizes), device=factor.device)
        for tensor, parts in own:
            factors = tensor.factors(factor / self._bounds[id(tensor)])
            for part in parts:
                low, high = part.kept
                gradient, target = _elements(part, gradients, low, high), part.of(whole, low, high)
                for box in tensor.boxes(part, low, high):
                    _scale(box, gradient, factors, target)
        pairs = zip(whole.split(sizes), gradients, strict=True)
        return [part.view(gradient.shape) for part, gradient in pairs]


def _scale(box: _Box, gradient: Tensor, factors: dict[str, Tensor], target: Tensor) -> None:
    """Write a box of a gradient, times its factors."""
    values, into = box.of(gradient), box.of(target)
    if "square" in factors:
        torch.mul(values, factors["square"][box.here], out=into)
        return
    *outer, rows, columns = box.here
    torch.mul(values, factors["row"][(*outer, rows)], out=into)
    into.mul_(_as_row(factors["column"][(*outer, columns)]))


def _squared(values: Tensor, dim: int) -> Tensor:
    """Return sums of squares over a dimension, in float32, without a wider copy of the values."""
    length: Tensor = torch.linalg.vector_norm(values, dim=dim, dtype=torch.float32)
    return length.square_()


def _as_row(columns: Tensor) -> Tensor:
    return columns.unsqueeze(-2)


def _gradient(part: TensorPart, low: int, high: int, like: Tensor) -> Tensor:
    """Return the step's gradient of some elements of a part, on the device."""
    first = part.kept[0]
    return part.state.final_gradient(part.index)[low - first : high - first].to(like.device)


def _elements(part: TensorPart, gradients: list[Tensor], low: int, high: int) -> Tensor:
    """Return some elements out of a span's gradients: by block, or a vector of what is kept."""
    if len(gradients) == 1 and gradients[0].dim() == 1:
        return part.of(gradients[0], low, high)
    return gradients[part.index].reshape(-1)[low:high]


def _take(tensor: FactoredTensor, sums: list[Tensor], new: float, factor: Tensor) -> None:
    """Take a step's sums of squares into a tensor's means, unless the step does not count."""
    counts, shape = ~factor.isnan(), tensor.parameter.shape
    over = {"row": shape[-1], "column": shape[-2] if len(shape) > 1 else 1, "square": 1}
    for (name, mean), total in zip(tensor.means.items(), sums, strict=True):
        here = total[tensor.first : tensor.last] if len(shape) != 2 else total
        put(mean, torch.lerp(mean, here / over[name] + LEAST, new), counts)
