"""Cross-entropy with labels, mixed with a divergence from a teacher's distribution.

With z the logits, p the teacher's and q the model's probabilities at a temperature T, over tokens
or, where the teacher tells only its most probable ones, over these and all others together:

    forward   Σ p·log(p ÷ q)        (Hinton et al. 2015)
    reverse   Σ q·log(q ÷ p)
    js        β·Σ p·log(p ÷ m) + (1 − β)·Σ q·log(q ÷ m) (Agarwal et al. 2024), m = β·p + (1 − β)·q

    loss = (1 − share)·(−log softmax(z)[label]) + share·T²·divergence

The slope of a divergence in z is (q·d − q·Σ q·d) ÷ T, with d its slope in q: a chunk of logits
gives loss and gradients while it is at hand, as in `loss`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tutti.accelerator.reference.loss import CHUNK_ELEMENTS, Vocabulary
from tutti.models.distillation import Distillation

LEAST = -69.0  # log-probability of what nobody expects


class Told(NamedTuple):
    """What a teacher tells of some tokens: logits of a rank's part of the vocabulary, or the most.

    `logps_tk` has a column more than `tokens_tk`: what all other tokens have together.
    """

    logits_tv: Tensor | None = None
    tokens_tk: Tensor | None = None
    logps_tk: Tensor | None = None


class Given(NamedTuple):
    """What a rank computes a distilled loss with."""

    how: Distillation
    told: Callable[[slice], Told]  # of a run of tokens
    targets: Tensor
    token_weights: Tensor | None
    divisor: float
    soft_cap: float | None
    vocabulary: Vocabulary | None
    gradient_scale: float


def distilled_cross_entropy(
    x: Tensor, weight: Tensor, bias: Tensor | None, given: Given
) -> tuple[Tensor, Tensor]:
    """Return Σ weight·loss over the tokens, and each token's loss (without a gradient)."""
    result: tuple[Tensor, Tensor] = _Distilled.apply(
        x, weight, bias, given, torch.is_grad_enabled()
    )
    return result


class _Distilled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        given: Given,
        with_gradients: bool,
    ) -> tuple[Tensor, Tensor]:
        needs = [
            with_gradients and tensor is not None and tensor.requires_grad
            for tensor in (x, weight, bias)
        ]
        losses = torch.zeros(x.shape[0], dtype=torch.float32, device=x.device)
        grad_x = torch.empty_like(x) if needs[0] else None
        grad_weight = torch.zeros_like(weight) if needs[1] else None
        grad_bias = torch.zeros_like(bias) if needs[2] and bias is not None else None
        rows = max(1, CHUNK_ELEMENTS // weight.shape[0])
        for first in range(0, x.shape[0], rows):
            own = slice(first, first + rows)
            losses[own], gradient = _chunk(x[own], weight, bias, given, own)
            if given.token_weights is not None:
                gradient *= given.token_weights[own].unsqueeze(1)
            gradient = (gradient * (given.gradient_scale / given.divisor)).to(x.dtype)
            if grad_x is not None:
                grad_x[own] = gradient @ weight
            if grad_weight is not None:
                grad_weight += gradient.t() @ x[own]
            if grad_bias is not None:
                grad_bias += gradient.sum(0)
        ctx.gradients, ctx.scale = (grad_x, grad_weight, grad_bias), given.gradient_scale
        ctx.mark_non_differentiable(losses)
        weights = given.token_weights
        return losses.sum() if weights is None else (losses * weights).sum(), losses

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        factor = gradients[0] / ctx.scale
        made = (None if own is None else own * factor.to(own.dtype) for own in ctx.gradients)
        return (*made, None, None)


def _chunk(
    x: Tensor, weight: Tensor, bias: Tensor | None, given: Given, own: slice
) -> tuple[Tensor, Tensor]:
    """Return the losses of some tokens, and their slopes in the product, still to be divided."""
    how, vocabulary, targets = given.how, given.vocabulary, given.targets[own]
    logits = (x @ weight.t()).float()
    logits = logits if bias is None else logits + bias.float()
    logits = logits / given.divisor
    cap = given.soft_cap
    capped = logits if cap is None else cap * torch.tanh(logits / cap)
    counted = (targets >= 0).float().unsqueeze(1)
    logq = _log_softmax(capped / how.temperature, vocabulary)
    divergence, slopes = _divergence(logq, given, own)
    scale = how.share * how.temperature
    losses = divergence * (scale * how.temperature)
    gradient = slopes * scale
    if how.share < 1.0:
        plain = logq if how.temperature == 1.0 else _log_softmax(capped, vocabulary)
        column, here = _columns(targets.unsqueeze(1), weight.shape[0], vocabulary)
        chosen = _total((plain.gather(1, column) * here).sum(1), vocabulary)
        losses = losses - (1.0 - how.share) * chosen
        gradient += (1.0 - how.share) * plain.exp().scatter_add(1, column, -here.float())
    if cap is not None:
        gradient *= 1.0 - (capped / cap).square()
    return losses * counted.squeeze(1), gradient * counted


def _divergence(logq: Tensor, given: Given, own: slice) -> tuple[Tensor, Tensor]:
    """Return the divergence of each token, and its slopes in logits ÷ temperature."""
    how, vocabulary, told = given.how, given.vocabulary, given.told(own)
    q = logq.exp()
    if told.logits_tv is not None:
        logp = _log_softmax(told.logits_tv.float() / how.temperature, vocabulary)
        terms, pulls = _terms(how, logp, logq)
        whole = _total(torch.stack((terms.sum(1), pulls.sum(1))), vocabulary)
        return whole[0], pulls - q * whole[1].unsqueeze(1)
    assert told.tokens_tk is not None
    assert told.logps_tk is not None
    column, here = _columns(told.tokens_tk, logq.shape[1], vocabulary)
    most = _total(logq.gather(1, column) * here, vocabulary)
    others = q.scatter_add(1, column, -q.gather(1, column) * here)
    left = _total(others.sum(1, keepdim=True), vocabulary).clamp_min(1e-30)
    terms, pulls = _terms(how, told.logps_tk, torch.cat((most, left.log()), 1))
    slopes = others * (pulls[:, -1:] / left) - q * pulls.sum(1, keepdim=True)
    return terms.sum(1), slopes.scatter_add(1, column, pulls[:, :-1] * here)


def _terms(how: Distillation, logp: Tensor, logq: Tensor) -> tuple[Tensor, Tensor]:
    """Return the terms of a divergence, and q times their slopes in q."""
    logp, logq = logp.clamp_min(LEAST), logq.clamp_min(LEAST)
    p, q = logp.exp(), logq.exp()
    if how.divergence == "forward":
        return p * (logp - logq), -p
    if how.divergence == "reverse":
        terms = q * (logq - logp)
        return terms, terms + q
    part = how.mixture
    logm = (part * p + (1.0 - part) * q).log()
    pulls = (1.0 - part) * q * (logq - logm)
    return part * p * (logp - logm) + pulls, pulls


def most_probable(
    logits_tv: Tensor, how: Distillation, vocabulary: Vocabulary | None, gather: Gather
) -> Told:
    """Return a teacher's most probable tokens and what the others have, from a rank's logits."""
    assert how.top_k is not None
    logps = _log_softmax(logits_tv.float() / how.temperature, vocabulary)
    start = 0 if vocabulary is None else vocabulary.start
    values, tokens = logps.topk(min(how.top_k, logps.shape[1]), dim=1)
    values, tokens = gather(values), gather(tokens + start)
    values, places = values.topk(min(how.top_k, values.shape[1]), dim=1)
    tokens = tokens.gather(1, places)
    column, here = _columns(tokens, logps.shape[1], vocabulary)
    p = logps.double().exp()
    others = p.scatter_add(1, column, -p.gather(1, column) * here)
    left = _total(others.sum(1, keepdim=True), vocabulary).clamp_min(1e-30).log().float()
    return Told(tokens_tk=tokens, logps_tk=torch.cat((values, left), 1))


Gather = Callable[[Tensor], Tensor]  # columns of all ranks that slice the vocabulary


def _columns(tokens: Tensor, width: int, vocabulary: Vocabulary | None) -> tuple[Tensor, Tensor]:
    """Return where tokens stand in a rank's part (others': at 0), and whether they do."""
    local = tokens - (0 if vocabulary is None else vocabulary.start)
    here = (local >= 0) & (local < width)
    return local.where(here, 0), here


def _log_softmax(logits: Tensor, vocabulary: Vocabulary | None) -> Tensor:
    if vocabulary is None:
        return torch.log_softmax(logits, 1)
    top = logits.amax(1)
    vocabulary.maximum(top)
    shifted = logits - top.unsqueeze(1)
    total = shifted.exp().sum(1)
    vocabulary.total(total)
    return shifted - total.log().unsqueeze(1)


def _total(values: Tensor, vocabulary: Vocabulary | None) -> Tensor:
    if vocabulary is not None:
        values = values.contiguous()
        vocabulary.total(values)
    return values
