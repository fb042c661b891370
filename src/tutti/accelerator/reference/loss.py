"""The output head and its cross-entropy in one operator that never holds all logits.

Tokens go through in chunks; the gradients of a chunk are computed while its logits are at hand, so
that only the gradients of x and of the weight are kept. With a sliced vocabulary every rank has
some columns of the logits; `vocabulary` joins maxima and sums across the ranks.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from tutti.accelerator.products import add_product, product
from tutti.models.operators import LOGIT_CHUNK_BYTES

CHUNK_ELEMENTS = LOGIT_CHUNK_BYTES // 8  # logits at a time, and their exponentials


class Vocabulary(Protocol):
    """How ranks that each hold a part of the vocabulary join their parts, in place."""

    @property
    def start(self) -> int:
        """The first token of this rank's part."""

    def maximum(self, values: Tensor) -> None:
        """Replace the values by their maximum over the ranks."""

    def total(self, values: Tensor) -> None:
        """Replace the values by their sum over the ranks."""


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    token_weights: Tensor | None = None,
    divisor: float = 1.0,
    soft_cap: float | None = None,
    vocabulary: Vocabulary | None = None,
    gradient_scale: float = 1.0,
    starts_backward: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return Σ weight·loss over the tokens, and each token's loss (without a gradient).

    x (T, C), weight (V, C). A negative target has no loss. Logits are x·Wᵀ + b, ÷ `divisor`, soft
    capped. Gradients are made for `gradient_scale` times the sum, so that a scaled fp16 loss loses
    nothing; backward multiplies by the gradient that comes in ÷ `gradient_scale`. Who sets
    `starts_backward` promises that the two are equal; this saves a pass over that of the weight.
    """
    result: tuple[Tensor, Tensor] = _LinearCrossEntropy.apply(
        x, weight, bias, targets, token_weights, divisor, soft_cap, vocabulary, gradient_scale,
        starts_backward, torch.is_grad_enabled(),
    )  # fmt: skip
    return result


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        token_weights: Tensor | None,
        divisor: float,
        soft_cap: float | None,
        vocabulary: Vocabulary | None,
        gradient_scale: float,
        starts_backward: bool,
        with_gradients: bool,
    ) -> tuple[Tensor, Tensor]:
        needs = [
            with_gradients and tensor is not None and tensor.requires_grad
            for tensor in (x, weight, bias)
        ]
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        losses = torch.zeros(x.shape[0], dtype=wide, device=x.device)
        grad_x = torch.empty_like(x) if needs[0] else None
        grad_weight: Tensor | None = None
        grad_bias = torch.zeros_like(bias) if needs[2] and bias is not None else None
        rows = max(1, CHUNK_ELEMENTS // weight.shape[0])
        for first in range(0, x.shape[0], rows):
            own = slice(first, first + rows)
            logits = _logits(x[own], weight, bias, divisor, wide)
            capped = logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)
            local = targets[own] - (0 if vocabulary is None else vocabulary.start)
            counted = targets[own] >= 0
            here = counted & (local >= 0) & (local < weight.shape[0])
            column = local.where(here, 0).unsqueeze(1)
            slope = None if soft_cap is None else 1.0 - (capped / soft_cap).square()
            losses[own], gradient, total = _losses(capped, column, here, counted, vocabulary)
            if not any(needs):
                del logits, capped, slope, gradient
                continue
            share = counted.to(wide) * (gradient_scale / divisor)
            if token_weights is not None:
                share = share * token_weights[own]
            gradient *= (share / total).unsqueeze(1)
            gradient.scatter_add_(1, column, -(here * share).unsqueeze(1))
            if slope is not None:
                gradient *= slope
            gradient = gradient.to(x.dtype)
            if grad_x is not None:
                grad_x[own] = product(gradient, weight)
            if needs[1] and grad_weight is None:
                grad_weight = product(gradient.t(), x[own])
            elif grad_weight is not None:
                add_product(grad_weight, gradient.t(), x[own])
            if grad_bias is not None:
                grad_bias += gradient.sum(0)
            del logits, capped, slope, gradient  # before the next chunk's are made
        if needs[1] and grad_weight is None:  # no tokens
            grad_weight = torch.zeros_like(weight)
        ctx.gradients = (grad_x, grad_weight, grad_bias)
        ctx.gradient_scale, ctx.starts_backward = gradient_scale, starts_backward
        ctx.mark_non_differentiable(losses)
        total = losses.sum() if token_weights is None else (losses * token_weights).sum()
        return total, losses

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        made = ctx.gradients
        if ctx.starts_backward:  # once: the tensors themselves are handed on
            ctx.gradients = (None, None, None)
        else:
            factor = gradients[0] / ctx.gradient_scale
            made = tuple(None if own is None else own * factor.to(own.dtype) for own in made)
        return (*made, *([None] * 8))


def _logits(
    x: Tensor, weight: Tensor, bias: Tensor | None, divisor: float, wide: torch.dtype
) -> Tensor:
    logits = product(x, weight.t())
    if bias is not None:
        logits = logits + bias
    logits = logits.to(wide)
    return logits if divisor == 1.0 else logits / divisor


def _losses(
    logits: Tensor, column: Tensor, here: Tensor, counted: Tensor, vocabulary: Vocabulary | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of every row, and exponentials in the place of its logits with their sum."""
    largest = logits.amax(1)
    if vocabulary is not None:
        vocabulary.maximum(largest)
    chosen = logits.gather(1, column).squeeze(1) * here
    powers = logits.sub_(largest.unsqueeze(1)).exp_()
    total = powers.sum(1)
    if vocabulary is not None:
        both = torch.stack((total, chosen))
        vocabulary.total(both)
        total, chosen = both.unbind()
    return (largest + torch.log(total) - chosen) * counted, powers, total
