"""Matrix products with weights, and table look-ups, in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tutti.accelerator.gradients import WeightGradients
from tutti.accelerator.products import add_product, linear_product, product, write_product

TableGradient = Callable[[Tensor, Tensor, Tensor], Tensor]


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, later: WeightGradients | None = None
) -> Tensor:
    """Return x·Wᵀ + b; with `later`, the weight's gradient is left there by backward."""
    trained = weight.requires_grad or (bias is not None and bias.requires_grad)
    if later is None or not trained or not torch.is_grad_enabled():  # keeps no input for nothing
        return linear_product(x, weight, bias)
    y: Tensor = _LaterLinear.apply(x, weight, bias, later)
    return y


def defer_products(
    later: WeightGradients, weight: Tensor, bias: Tensor | None, rows: Tensor, columns: Tensor
) -> None:
    """Leave the gradients of a linear layer for later: of its outputs `rows`, inputs `columns`.

    These lead to no graph: it would hold the input of the whole unit and its gradient, too.
    """
    rows, columns = rows.detach(), columns.detach()
    later.defer(
        weight,
        lambda: product(rows.t(), columns),
        lambda target: write_product(target, rows.t(), columns),
        lambda total: add_product(total, rows.t(), columns),
    )
    if bias is not None:
        defer_bias(later, bias, rows)


def defer_bias(later: WeightGradients, bias: Tensor, rows: Tensor) -> None:
    """Leave the gradient of a bias for later: of outputs `rows`."""
    later.defer(
        bias,
        lambda: rows.sum(0),
        lambda target: torch.sum(rows, 0, out=target),
        lambda total: total.add_(rows.sum(0, dtype=total.dtype)),
    )


class _LaterLinear(torch.autograd.Function):
    """A linear layer whose backward computes the input's gradient only."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, later: WeightGradients
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.later = weight, bias, later  # the parameters themselves
        return linear_product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, None]:
        (gradient,) = gradients
        (x,), weight, bias = ctx.saved_tensors, ctx.weight, ctx.bias
        rows, columns = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
        defer_products(ctx.later, weight, bias, rows, columns)
        return (product(gradient, weight) if ctx.needs_input_grad[0] else None), None, None, None


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    counts: Tensor,
    bias: Tensor | None = None,
    *,
    later: WeightGradients | None = None,
) -> Tensor:
    """Return each run of rows times its own expert's weight: x (T, in), weight (E, out, in).

    The first `counts[0]` rows belong to expert 0, the next `counts[1]` to expert 1, and so on.
    """
    if later is None or not torch.is_grad_enabled():
        return _each_expert(x, weight, counts.tolist(), bias)
    y: Tensor = _LaterGrouped.apply(x, weight, counts.tolist(), bias, later)
    return y


def _each_expert(x: Tensor, weight: Tensor, sizes: list[int], bias: Tensor | None) -> Tensor:
    runs = [
        linear_product(run, weight[e], None if bias is None else bias[e])
        for e, run in enumerate(x.split(sizes))
    ]
    return torch.cat(runs)


class _LaterGrouped(torch.autograd.Function):
    """A grouped linear layer whose backward computes the input's gradient only."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        sizes: list[int],
        bias: Tensor | None,
        later: WeightGradients,
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.sizes, ctx.later = weight, bias, sizes, later
        return _each_expert(x, weight, sizes, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        (gradient,) = gradients
        (x,), weight, bias = ctx.saved_tensors, ctx.weight, ctx.bias
        runs, inputs = gradient.split(ctx.sizes), x.detach().split(ctx.sizes)
        ctx.later.defer(
            weight,
            lambda: torch.stack([product(g.t(), own) for g, own in zip(runs, inputs, strict=True)]),
        )
        if bias is not None:
            ctx.later.defer(bias, lambda: torch.stack([g.sum(0) for g in runs]))
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None
        grad_x = torch.cat([product(g, weight[e]) for e, g in enumerate(runs)])
        return grad_x, None, None, None, None


def embedding(tokens: Tensor, table: Tensor, *, later: WeightGradients | None = None) -> Tensor:
    """Return the rows of the table that the tokens name; a negative token gives zeros."""
    if later is not None and torch.is_grad_enabled():
        return later_embedding(tokens, table, later, _table_gradient)
    rows: Tensor = _Embedding.apply(tokens.clamp_min(0), table)
    return rows.masked_fill((tokens < 0).unsqueeze(-1), 0.0)


def later_embedding(
    tokens: Tensor, table: Tensor, later: WeightGradients, gradient_of: TableGradient
) -> Tensor:
    """Look rows up; the table's gradient, by `gradient_of` if it goes on no sum, is left for later.

    A negative token gives zeros and takes none: where many of them name one row, those that add it
    up wait for each other. So each names another.
    """
    outside = tokens < 0
    others = torch.arange(tokens.numel(), device=tokens.device).view(tokens.shape)
    named = torch.where(outside, others % table.shape[0], tokens)
    rows: Tensor = _LaterEmbedding.apply(named, table, later, gradient_of)
    return rows.masked_fill(outside.unsqueeze(-1), 0.0)


class _Embedding(torch.autograd.Function):
    """A look-up whose backward sums in float32: a frequent token has thousands of gradients.

    Equal tokens are found by sorting, and room is made for as many as there are tokens, so that
    nobody has to know how many there are: a chip's host would wait for that.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.table = table.detach()
        return functional.embedding(tokens, table)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        (tokens,) = ctx.saved_tensors
        return None, _table_gradient(tokens, gradients[0], ctx.table)


def _table_gradient(tokens: Tensor, gradient: Tensor, table: Tensor) -> Tensor:
    """Return the whole gradient of a table."""
    gradient, dtype = gradient.flatten(0, -2), table.dtype
    ordered, order = tokens.flatten().sort(stable=True)
    first = torch.ones_like(ordered)
    first[1:] = ordered[1:] != ordered[:-1]
    place = first.cumsum(0) - 1  # which of the distinct tokens each one is
    wide = gradient.to(torch.promote_types(dtype, torch.float32))
    sums = torch.zeros_like(wide).index_add_(0, place, wide[order])
    used = torch.zeros_like(ordered).scatter_(0, place, ordered)  # beyond: row 0, plus zero
    return torch.zeros_like(table, requires_grad=False).index_add_(0, used, sums.to(dtype))


class _LaterEmbedding(torch.autograd.Function):
    """A look-up whose backward computes nothing: the table's gradient is left for later.

    Onto a sum go only the rows of tokens that were there, not a whole table of zeros.
    """

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, table: Tensor, later: WeightGradients, gradient_of: TableGradient
    ) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.table, ctx.later, ctx.gradient_of = table, later, gradient_of  # the parameter itself
        return functional.embedding(tokens, table)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None, None]:
        (tokens,), table, (gradient,) = ctx.saved_tensors, ctx.table, gradients
        gradient_of = ctx.gradient_of
        ctx.later.defer(
            table,
            lambda: gradient_of(tokens, gradient, table),
            add=lambda total: _add_rows(total, tokens.flatten(), gradient.flatten(0, -2)),
        )
        return None, None, None, None


def _add_rows(total: Tensor, tokens: Tensor, rows: Tensor) -> None:
    """Add rows to those of a sum that tokens name; the same bits every time."""
    wide = rows.to(total.dtype)
    if total.device.type == "cpu":  # in order
        total.index_add_(0, tokens, wide)
    else:  # sorts; `index_add_` would add in any order
        total.index_put_((tokens,), wide, accumulate=True)
