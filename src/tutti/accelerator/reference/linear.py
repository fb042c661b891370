"""Matrix products with weights, and table look-ups, in plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tutti.accelerator.gradients import WeightGradients

WIDE_PRODUCTS = ("cuda",)  # where products of half precision can be written in float32


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, later: WeightGradients | None = None
) -> Tensor:
    """Return x·Wᵀ + b; with `later`, the weight's gradient is left there by backward."""
    if later is None or not torch.is_grad_enabled():
        return functional.linear(x, weight, bias)
    y: Tensor = _LaterLinear.apply(x, weight, bias, later)
    return y


class _LaterLinear(torch.autograd.Function):
    """A linear layer whose backward computes the input's gradient only."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, later: WeightGradients
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.later = weight, bias, later  # the parameters themselves
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, None]:
        (gradient,) = gradients
        (x,), weight, bias = ctx.saved_tensors, ctx.weight, ctx.bias
        rows, columns = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
        ctx.later.defer(
            weight,
            lambda: rows.t() @ columns,
            lambda target: torch.mm(rows.t(), columns, out=target),
            lambda total: _add_product(total, rows.t(), columns),
        )
        if bias is not None:
            ctx.later.defer(
                bias,
                lambda: rows.sum(0),
                lambda target: torch.sum(rows, 0, out=target),
                lambda total: total.add_(rows.sum(0, dtype=total.dtype)),
            )
        return (gradient @ weight if ctx.needs_input_grad[0] else None), None, None, None


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a·b to a sum, in the sum's precision where the device can."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.device.type in WIDE_PRODUCTS:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.add_(a @ b)


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
        functional.linear(run, weight[e], None if bias is None else bias[e])
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
        runs, inputs = gradient.split(ctx.sizes), x.split(ctx.sizes)
        ctx.later.defer(
            weight,
            lambda: torch.stack([g.t() @ own for g, own in zip(runs, inputs, strict=True)]),
        )
        if bias is not None:
            ctx.later.defer(bias, lambda: torch.stack([g.sum(0) for g in runs]))
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None
        grad_x = torch.cat([g @ weight[e] for e, g in enumerate(runs)])
        return grad_x, None, None, None, None


def embedding(tokens: Tensor, table: Tensor, *, later: WeightGradients | None = None) -> Tensor:
    """Return the rows of the table that the tokens name; a negative token gives zeros."""
    if later is not None and torch.is_grad_enabled():
        return later_embedding(tokens, table, later)
    rows: Tensor = _Embedding.apply(tokens.clamp_min(0), table)
    return rows.masked_fill((tokens < 0).unsqueeze(-1), 0.0)


def later_embedding(tokens: Tensor, table: Tensor, later: WeightGradients) -> Tensor:
    """Look rows up; the table's gradient is left for later."""
    rows: Tensor = _LaterEmbedding.apply(tokens.clamp_min(0), table, later)
    return rows.masked_fill((tokens < 0).unsqueeze(-1), 0.0)


class _Embedding(torch.autograd.Function):
    """A look-up whose backward sums in float32: a frequent token has thousands of gradients.

    Equal tokens are found by sorting, and room is made for as many as there are tokens, so that
    nobody has to know how many there are: a chip's host would wait for that.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.rows, ctx.dtype = table.shape[0], table.dtype
        return functional.embedding(tokens, table)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        (tokens,) = ctx.saved_tensors
        return None, _table_gradient(tokens, gradients[0], ctx.rows, ctx.dtype)


def _table_gradient(tokens: Tensor, gradient: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    gradient = gradient.flatten(0, -2)
    ordered, order = tokens.flatten().sort(stable=True)
    first = torch.ones_like(ordered)
    first[1:] = ordered[1:] != ordered[:-1]
    place = first.cumsum(0) - 1  # which of the distinct tokens each one is
    wide = gradient.to(torch.promote_types(dtype, torch.float32))
    sums = torch.zeros_like(wide).index_add_(0, place, wide[order])
    used = torch.zeros_like(ordered).scatter_(0, place, ordered)  # beyond: row 0, plus zero
    table = gradient.new_zeros(rows, gradient.shape[-1], dtype=dtype)
    return table.index_add_(0, used, sums.to(dtype))


class _LaterEmbedding(torch.autograd.Function):
    """A look-up whose backward computes nothing: the table's gradient is left for later.

    Onto a sum go only the rows of tokens that were there, not a whole table of zeros.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, table: Tensor, later: WeightGradients) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.table, ctx.later = table, later  # the parameter itself
        return functional.embedding(tokens, table)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        (tokens,), table, (gradient,) = ctx.saved_tensors, ctx.table, gradients
        ctx.later.defer(
            table,
            lambda: _table_gradient(tokens, gradient, table.shape[0], table.dtype),
            add=lambda total: _add_rows(total, tokens.flatten(), gradient.flatten(0, -2)),
        )
        return None, None, None


def _add_rows(total: Tensor, tokens: Tensor, rows: Tensor) -> None:
    """Add rows to those of a sum that tokens name; the same bits every time."""
    wide = rows.to(total.dtype)
    if total.device.type == "cpu":  # in order
        total.index_add_(0, tokens, wide)
    else:  # sorts; `index_add_` would add in any order
        total.index_put_((tokens,), wide, accumulate=True)
