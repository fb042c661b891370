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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tutti.accelerator.gradients import WeightGradients
from tutti.accelerator.operators import Operators
from tutti.nn.parallel import ParallelContext, Pending, Ready, shares


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

    def summed(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the sum over the ranks of x·Wᵀ, of this rank's tokens."""
        group, flights = self.parallel.tensor, []
        for piece, rows in zip(self.cut.whole(x), self.cut.pieces, strict=True):
            y = self.operators.linear(piece, weight)
            if self.gathers:
                flights.append(group.start_reduce_scatter(y, rows))
            else:
                flights.append(group.start_all_reduce(y))
        return torch.cat([flight.wait() for flight in flights])

    def keep(self, ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """Keep what backward needs: the parameters themselves, whatever lies in them then."""
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.beside = weight, bias, self


class _Column(torch.autograd.Function):
    """x·Wᵀ + b of all tokens, from each rank's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, beside: Beside) -> Tensor:
        beside.keep(ctx, x, weight, bias)
        linear = beside.operators.linear
        return beside.in_order([linear(piece, weight, bias) for piece in beside.gathered(x)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient, (x,) = gradients[0].contiguous(), ctx.saved_tensors
        beside, weight, bias = ctx.beside, ctx.weight, ctx.bias
        needed = ctx.needs_input_grad
        linear, later = beside.operators.linear, beside.later
        inputs = beside.start_gather(x) if needed[1] else Ready(x)
        grad_x = beside.summed(gradient, weight.t()) if needed[0] else None
        if later is None:
            grad_weight = linear(gradient.t(), inputs.wait().t()) if needed[1] else None
            return grad_x, grad_weight, None if bias is None else gradient.sum(0), None
        later.defer(weight, lambda: linear(gradient.t(), inputs.wait().t()))
        if bias is not None:
            later.defer(bias, lambda: gradient.sum(0))
        return grad_x, None, None, None


class _Row(torch.autograd.Function):
    """The sum over the ranks of x·Wᵀ, of this rank's tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, beside: Beside) -> Tensor:
        beside.keep(ctx, x, weight, None)
        return beside.summed(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x,), weight, beside = ctx.saved_tensors, ctx.weight, ctx.beside
        needed = ctx.needs_input_grad
        linear, later = beside.operators.linear, beside.later
        pieces, inputs = [], []
        for piece in beside.gathered(gradients[0].contiguous()):
            pieces.append(piece)
            inputs.append(linear(piece, weight.t()))
        grad_x = beside.in_order(inputs) if needed[0] else None

        def of_weight() -> Tensor:
            columns = beside.cut.by_piece(x) if beside.gathers else x
            found: Tensor = linear(torch.cat(pieces).t(), columns.t())
            return found

        if later is None:
            return grad_x, of_weight() if needed[1] else None, None
        later.defer(weight, of_weight)
        return grad_x, None, None


def column_product(x: Tensor, weight: Tensor, bias: Tensor | None, beside: Beside) -> Tensor:
    """Return x·Wᵀ + b of all tokens, where each rank has its own of them and a slice of W."""
    y: Tensor = _Column.apply(x, weight, bias, beside)
    return y


def row_product(x: Tensor, weight: Tensor, beside: Beside) -> Tensor:
    """Return the sum of the ranks' x·Wᵀ, for its own tokens on each."""
    y: Tensor = _Row.apply(x, weight, beside)
    return y
