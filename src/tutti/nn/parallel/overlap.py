"""Products of tensor-parallel ranks in pieces, each beside the collective of another.

| product | forward                              | backward (input part)                   |
|---------|--------------------------------------|-----------------------------------------|
| column  | gather a piece, multiply it          | multiply a piece, reduce-scatter it     |
| row     | multiply a piece, reduce-scatter it  | gather a piece of gradients, multiply it|

All gathers are started at once and waited for one by one; sums are started as products are made and
waited for at the end. Without sequence parallelism nothing is gathered and sums are all-reduces. A
piece is a run of each rank's own tokens, so that every rank sends as much in each. What is kept for
backward is a rank's own tokens: a column product gathers them once more, behind its pieces, for the
weight's gradient, which stays one product. Collectives run in `comm`'s thread, products here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tutti.accelerator.gradients import WeightGradients
from tutti.accelerator.operators import Operators
from tutti.nn.parallel.groups import ParallelContext, Pending, Ready, shares

Made = Callable[[], Tensor]


class Cut:
    """Tokens cut into pieces: each a run of every rank's share of them."""

    def __init__(self, rows: Sequence[int], chunks: int) -> None:
        """Cut the `rows` of each share; pieces without a token are left out, on all ranks alike."""
        self.rows = tuple(rows)
        runs = zip(*(shares(count, chunks) for count in rows), strict=True)
        self.pieces = tuple(piece for piece in runs if sum(piece))  # rows of each share, by piece

    def own(self, x: Tensor, rank: int) -> list[Tensor]:
        """Return the pieces of one share."""
        return list(x.split([piece[rank] for piece in self.pieces]))

    def whole(self, x: Tensor) -> Iterator[Tensor]:
        """Yield the pieces of all tokens."""
        for runs in self._runs(x):
            yield runs[0] if len(runs) == 1 else torch.cat(runs)

    def _runs(self, x: Tensor) -> list[tuple[Tensor, ...]]:
        parts = enumerate(x.split(list(self.rows)))
        return list(zip(*(self.own(part, rank) for rank, part in parts), strict=True))

    def by_piece(self, x: Tensor) -> Tensor:
        """Return all tokens, piece after piece."""
        return torch.cat([run for runs in self._runs(x) for run in runs])

    def joined(self, pieces: Sequence[Tensor]) -> Tensor:
        """Return all tokens in their order again."""
        runs = [x.split(list(rows)) for x, rows in zip(pieces, self.pieces, strict=True)]
        return torch.cat([run[rank] for rank in range(len(self.rows)) for run in runs])


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """What a product needs to run beside its collectives."""

    parallel: ParallelContext
    operators: Operators
    later: WeightGradients | None
    cut: Cut

    @classmethod
    def of(
        cls,
        parallel: ParallelContext,
        operators: Operators,
        num_tokens: int,
        later: WeightGradients | None,
    ) -> Beside:
        """Cut so many tokens as the ranks share them."""
        ways = parallel.tensor.size if parallel.sequence_parallel else 1
        cut = Cut(shares(num_tokens, ways), parallel.overlap_chunks)
        return cls(parallel=parallel, operators=operators, later=later, cut=cut)

    @property
    def gathers(self) -> bool:
        """Whether ranks hold only their own tokens between sliced layers."""
        return self.parallel.sequence_parallel

    def gathered(self, x: Tensor) -> Iterator[Tensor]:
        """Yield the pieces of all tokens, out of the ranks' own, as they arrive."""
        group = self.parallel.tensor
        if not self.gathers:
            yield x
            return
        pieces = zip(self.cut.own(x, group.rank), self.cut.pieces, strict=True)
        flights = [group.start_all_gather(own.contiguous(), rows) for own, rows in pieces]
        for flight in flights:
            yield flight.wait()

    def start_gather(self, x: Tensor) -> Pending:
        """Start to gather all tokens, in order."""
        if not self.gathers:
            return Ready(x)
        return self.parallel.tensor.start_all_gather(x.contiguous(), self.cut.rows)

    def in_order(self, pieces: Sequence[Tensor]) -> Tensor:
        """Return what `gathered` yielded, in the order of tokens."""
        return self.cut.joined(pieces) if self.gathers else pieces[0]

    def summed(self, pieces: Iterable[Tensor]) -> Tensor:
        """Return the sum over the ranks, of this rank's tokens; pieces are started as they come."""
        group, flights = self.parallel.tensor, []
        for y, rows in zip(pieces, self.cut.pieces, strict=True):
            if self.gathers:
                flights.append(group.start_reduce_scatter(y, rows))
            else:
                flights.append(group.start_all_reduce(y))
        return torch.cat([flight.wait() for flight in flights])

    def of_parameters(
        self, layer: Layer, rows: Made, columns: Made
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of a layer's weight and bias, or leave them for later.

        They are made of the gradient's rows and the input's, which may still be under way.
        """
        if layer.weight is None:
            return None, None

        def of_weight() -> Tensor:
            return self.operators.linear(rows().t(), columns().t())

        def of_bias() -> Tensor:
            return rows().sum(0)

        if self.later is None:
            weight = of_weight() if layer.weight.requires_grad else None
            return weight, None if layer.bias is None else of_bias()
        self.later.defer(layer.weight, of_weight)
        if layer.bias is not None:
            self.later.defer(layer.bias, of_bias)
        return None, None


class Layer(NamedTuple):
    """A product with some columns of the input; without a weight these are passed on."""

    columns: int
    weight: Tensor | None = None
    bias: Tensor | None = None


class _Column(torch.autograd.Function):
    """x·Wᵀ + b of all tokens, from each rank's own; one result for each layer."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, beside: Beside, layers: Sequence[Layer], *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        del parameters  # the layers' own: here only to connect the graph
        ctx.save_for_backward(x)
        ctx.beside, ctx.layers = beside, layers  # parameters themselves, whatever lies in them then
        widths, linear = [layer.columns for layer in layers], beside.operators.linear
        products = []
        for piece in beside.gathered(x):
            parts = zip(piece.split(widths, dim=1), layers, strict=True)
            products.append(
                [
                    part.contiguous() if weight is None else linear(part, weight, bias)
                    for part, (_, weight, bias) in parts
                ]
            )
        return tuple(beside.in_order(pieces) for pieces in zip(*products, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        beside, layers, needed = ctx.beside, ctx.layers, ctx.needs_input_grad
        rows = [gradient.contiguous() for gradient in gradients]
        linear = beside.operators.linear
        weights = [layer.weight for layer in layers]
        x = ctx.saved_tensors[0].detach()  # what waits for later holds no graph
        inputs: Pending = beside.start_gather(x) if any(needed[3::2]) else Ready(x)

        def of_input() -> Iterator[Tensor]:
            for pieces in zip(*(beside.cut.whole(part) for part in rows), strict=True):
                parts = [
                    piece if weight is None else linear(piece, weight.t())
                    for piece, weight in zip(pieces, weights, strict=True)
                ]
                yield parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

        grad_x = beside.summed(of_input()) if needed[0] else None
        whole = functools.cache(lambda: inputs.wait().split([c for c, _, _ in layers], dim=1))
        answers: list[Tensor | None] = []
        for index, (layer, part) in enumerate(zip(layers, rows, strict=True)):
            columns = functools.partial(lambda i: whole()[i], index)
            answers += beside.of_parameters(layer, functools.partial(_given, part), columns)
        return grad_x, None, None, *answers


class _Row(torch.autograd.Function):
    """The sum over the ranks of x·Wᵀ, of this rank's tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, beside: Beside) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.beside = weight, beside
        linear = beside.operators.linear
        return beside.summed(linear(piece, weight) for piece in beside.cut.whole(x))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, beside = ctx.saved_tensors[0].detach(), ctx.weight, ctx.beside
        linear = beside.operators.linear
        pieces, inputs = [], []
        for piece in beside.gathered(gradients[0].contiguous()):
            pieces.append(piece)
            inputs.append(linear(piece, weight.t()))
        grad_x = beside.in_order(inputs) if ctx.needs_input_grad[0] else None
        layer = Layer(x.shape[1], weight)
        if beside.gathers:
            rows, columns = functools.partial(torch.cat, pieces), lambda: beside.cut.by_piece(x)
        else:
            rows, columns = functools.partial(_given, pieces[0]), lambda: x
        return grad_x, beside.of_parameters(layer, rows, columns)[0], None


def _given(x: Tensor) -> Tensor:
    return x


def column_products(x: Tensor, layers: Sequence[Layer], beside: Beside) -> tuple[Tensor, ...]:
    """Return x·Wᵀ + b of all tokens, where each rank has its own of them and a slice of W."""
    parameters = [parameter for layer in layers for parameter in layer[1:]]
    products: tuple[Tensor, ...] = _Column.apply(x, beside, layers, *parameters)
    return products


def row_product(x: Tensor, weight: Tensor, beside: Beside) -> Tensor:
    """Return the sum of the ranks' x·Wᵀ, for its own tokens on each."""
    y: Tensor = _Row.apply(x, weight, beside)
    return y
