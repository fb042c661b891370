"""Mixture of experts in plain torch: the router's choice, and moving tokens to experts and back."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tutti.models.parts import RouterSpec


class Routing(NamedTuple):
    """Which experts each token uses, and with which weight."""

    weights: Tensor  # (T, K), differentiable
    experts: Tensor  # (T, K)
    probabilities: Tensor  # (T, E), for the balancing loss


def route(
    logits: Tensor, router: RouterSpec, top: int, correction: Tensor | None = None
) -> Routing:
    """Return each token's `top` experts by its router logits (T, E)."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if router.scores == "topk_softmax":
        values, experts = torch.topk(wide, top, dim=-1)
        return Routing(values.softmax(-1) * router.scale, experts, wide.softmax(-1))
    if router.scores == "near_softmax":
        return _one_after_the_other(wide, router, top)
    scores = wide.sigmoid() if router.scores == "sigmoid" else wide.softmax(-1)
    steered = scores if correction is None else scores + correction.to(scores.dtype)
    if router.groups > 1:
        steered = _best_groups(steered, router)
    experts = torch.topk(steered, top, dim=-1, sorted=True).indices
    weights = scores.gather(1, experts)
    if router.normalize:
        total = weights.sum(-1, keepdim=True)
        if router.normalize_min:
            total = total.clamp_min(router.normalize_min)
        weights = weights / total
    return Routing(weights * router.scale, experts, scores)


def _one_after_the_other(logits: Tensor, router: RouterSpec, top: int) -> Routing:
    """Choose the best, then the best of the rest; each weighs its share among those near it."""
    rest, weights, experts = logits, [], []
    for _ in range(top):
        best, chosen = rest.detach().max(-1, keepdim=True)
        distance = (best - rest.detach()) / logits.detach().abs().clamp(min=best)
        shares = rest.masked_fill(distance > router.near, float("-inf")).softmax(-1)
        weights.append(shares.gather(1, chosen))
        experts.append(chosen)
        rest = rest.scatter(1, chosen, float("-inf"))
    scaled = torch.cat(weights, -1) * router.scale
    return Routing(scaled, torch.cat(experts, -1), logits.softmax(-1))


def _best_groups(scores: Tensor, router: RouterSpec) -> Tensor:
    """Return the scores with those outside the best groups of experts out of reach."""
    grouped = scores.unflatten(-1, (router.groups, -1))
    if router.group_score == "top2":
        group_scores = grouped.topk(2, dim=-1).values.sum(-1)
    else:
        group_scores = grouped.amax(-1)
    best = torch.topk(group_scores, router.top_groups, dim=-1, sorted=False).indices
    eligible = torch.zeros_like(group_scores, dtype=torch.bool).scatter(1, best, True)
    reachable: Tensor = grouped.masked_fill(~eligible.unsqueeze(-1), float("-inf")).flatten(-2)
    return reachable


class Permutation(NamedTuple):
    """Rows in the order of their experts, and the way back."""

    rows: Tensor  # (T·K, C), those of expert 0 first
    order: Tensor  # (T·K,): row i is choice order[i] % K of token order[i] // K
    counts: Tensor  # (E,) rows per expert


def permute(x: Tensor, experts: Tensor, num_experts: int) -> Permutation:
    """Return a copy of each token for each of its experts, sorted by expert; order is stable."""
    flat = experts.flatten()
    order = torch.argsort(flat, stable=True)
    counts = flat.new_zeros(num_experts).scatter_add_(0, flat, torch.ones_like(flat))
    return Permutation(x[order // experts.shape[1]], order, counts)


def unpermute(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Return each token's weighted sum of its experts' rows; weights (T, K)."""
    chosen = torch.empty_like(rows).index_copy(0, order, rows)
    each: Tensor = chosen.unflatten(0, weights.shape) * weights.unsqueeze(-1).to(rows.dtype)
    return each.sum(1)
