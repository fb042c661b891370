"""Products with what low-rank adapters add to them, in plain torch.

An adapter adds low·Upᵀ to some columns of a layer's output, low = scale · x·Downᵀ. No pass over the
output is made for a sum: of a frozen weight the adapter's product is written first and the layer's
goes onto it, which reads it while it still multiplies; otherwise the adapter's goes onto an output
that is there. So it is with the two parts of the input's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tutti.accelerator.gradients import WeightGradients
from tutti.accelerator.products import add_product, linear_product, product, write_product
from tutti.accelerator.reference.linear import defer_products


class UpFactor(NamedTuple):
    """One up factor: which rows of `down` it takes, which outputs it adds to."""

    weight: Tensor  # (stop - start, last - first)
    start: int
    stop: int
    first: int
    last: int


def low_rank_linear(
    x: Tensor,
    weight: Tensor,
    down: Tensor,
    ups: Sequence[UpFactor],
    scale: float,
    later: WeightGradients | None = None,
) -> Tensor:
    """Return x·Wᵀ, W frozen, with what adapters add; with `later`, their gradients go there."""
    y: Tensor = _LowRank.apply(x, None, weight, down, ups, scale, later, *_tensors(ups))
    return y


def add_low_rank(
    y: Tensor,
    x: Tensor,
    down: Tensor,
    ups: Sequence[UpFactor],
    scale: float,
    later: WeightGradients | None = None,
) -> Tensor:
    """Add to y, in place, what adapters make of x; return it."""
    added: Tensor = _LowRank.apply(x, y, None, down, ups, scale, later, *_tensors(ups))
    return added


def _tensors(ups: Sequence[UpFactor]) -> list[Tensor]:
    return [up.weight for up in ups]


class _LowRank(torch.autograd.Function):
    """A layer's output is given (y), or made here of a frozen weight."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        y: Tensor | None,
        weight: Tensor | None,
        down: Tensor,
        ups: Sequence[UpFactor],
        scale: float,
        later: WeightGradients | None,
        *_up_weights: Tensor,
    ) -> Tensor:
        low = linear_product(x, down).mul_(scale)
        if y is not None:
            ctx.mark_dirty(y)
            _add_ups(y, low, ups)
        elif weight is None or sum(up.stop - up.start for up in ups) < len(weight):
            assert weight is not None
            y = linear_product(x, weight)
            _add_ups(y, low, ups)
        else:
            y = x.new_empty(len(x), len(weight))
            for up in ups:
                columns = low[:, up.first : up.last]
                write_product(y[:, up.start : up.stop], columns, up.weight.t())
            add_product(y, x, weight.t())
        ctx.save_for_backward(x, low)
        # the parameters themselves, not what autograd would return of them
        ctx.weight, ctx.down, ctx.ups, ctx.scale, ctx.later = weight, down, ups, scale, later
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        (x, low), weight, down, later = ctx.saved_tensors, ctx.weight, ctx.down, ctx.later
        of_low = torch.empty_like(low)
        of_ups: list[Tensor | None] = []
        for up in ctx.ups:
            rows, columns = gradient[:, up.start : up.stop], low[:, up.first : up.last]
            write_product(of_low[:, up.first : up.last], rows, up.weight)
            if later is not None:
                defer_products(later, up.weight, None, rows, columns)
            of_ups.append(None if later is not None else product(rows.t(), columns))
        of_low.mul_(ctx.scale)
        if later is not None:
            defer_products(later, down, None, of_low, x)
        of_down = None if later is not None else product(of_low.t(), x)
        of_x = None
        if ctx.needs_input_grad[0] and weight is not None:
            of_x = product(of_low, down)
            add_product(of_x, gradient, weight)
        elif ctx.needs_input_grad[0]:
            of_x = product(of_low, down)
        of_y = gradient if weight is None else None
        return of_x, of_y, None, of_down, None, None, None, *of_ups


def _add_ups(y: Tensor, low: Tensor, ups: Sequence[UpFactor]) -> None:
    for up in ups:
        columns = low[:, up.first : up.last]
        add_product(y[:, up.start : up.stop], columns, up.weight.t())
