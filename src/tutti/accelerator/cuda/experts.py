"""Tokens on their way to experts and back, and the router's choice, in Triton.

Each token's rows are found by the inverse of the order, so that rows are read and written once and
sums have one order; nothing is sorted for a gradient, and the host is never asked.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tutti.accelerator.cuda.common import (
    WIDEST_ROW,
    power_of_two,
    reason_against,
    warps_for,
)
from tutti.accelerator.reference.experts import Permutation, Routing
from tutti.accelerator.registry import Implementation
from tutti.models.parts import RouterSpec

MOST_EXPERTS = 1024  # of a router whose scores one program holds
UNITS = 128  # about as many programs run at once; few tokens are spread over them
TILE = 4096  # scores that a program of the router holds at a time
SCORES = {"softmax": 0, "sigmoid": 1, "topk_softmax": 2}


# --- there and back --------------------------------------------------------------------------


@triton.jit
def _combine(
    rows, inverse, weights, out, width, row_step, out_step,
    CHOICES: tl.constexpr, WEIGHED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Add up the rows of a token, each times its weight if there are weights."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < width
    total = tl.zeros((WIDTH,), tl.float32)
    for choice in tl.static_range(CHOICES):
        place = tl.load(inverse + token * CHOICES + choice)
        row = tl.load(rows + place * row_step + column, mask=inside, other=0.0).to(tl.float32)
        if WEIGHED:
            row = row * tl.load(weights + token * CHOICES + choice).to(tl.float32)
        total += row
    tl.store(out + token * out_step + column, total, mask=inside)


@triton.jit
def _combine_backward(
    grad, rows, inverse, weights, grad_rows, grad_weights, width, grad_step, row_step,
    CHOICES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < width
    own = tl.load(grad + token * grad_step + column, mask=inside, other=0.0).to(tl.float32)
    for choice in tl.static_range(CHOICES):
        at = token * CHOICES + choice
        place = tl.load(inverse + at)
        row = tl.load(rows + place * row_step + column, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(weights + at).to(tl.float32)
        tl.store(grad_rows + place * width + column, own * weight, mask=inside)
        tl.store(grad_weights + at, tl.sum(own * row, axis=0))


def _inverse(order: Tensor) -> Tensor:
    """Return the row of each choice, by token."""
    numbers = torch.arange(order.numel(), device=order.device)
    return torch.empty_like(order).scatter_(0, order, numbers)


def _sum_rows(rows: Tensor, inverse: Tensor, weights: Tensor | None, choices: int) -> Tensor:
    width, num_tokens = rows.shape[1], inverse.numel() // choices
    out = rows.new_empty(num_tokens, width)
    _combine[(num_tokens,)](
        rows, inverse, rows if weights is None else weights, out, width, rows.stride(0), width,
        CHOICES=choices, WEIGHED=weights is not None, WIDTH=power_of_two(width),
        num_warps=warps_for(width),
    )  # fmt: skip
    return out


class _Copies(torch.autograd.Function):
    """A copy of each token for each of its experts; gradients of the copies are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, choices: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.choices = choices
        return x.index_select(0, order // choices)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return _sum_rows(gradients[0].contiguous(), _inverse(order), None, ctx.choices), None, None


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
        inverse, weights = _inverse(order), weights.contiguous()
        ctx.save_for_backward(rows, inverse, weights)
        return _sum_rows(rows, inverse, weights, weights.shape[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, Tensor]:
        rows, inverse, weights = ctx.saved_tensors
        grad, width = gradients[0].contiguous(), rows.shape[1]
        grad_rows = torch.empty_like(rows, memory_format=torch.contiguous_format)
        grad_weights = torch.empty_like(weights, dtype=torch.float32)
        _combine_backward[(weights.shape[0],)](
            grad, rows, inverse, weights, grad_rows, grad_weights, width, width, rows.stride(0),
            CHOICES=weights.shape[1], WIDTH=power_of_two(width), num_warps=warps_for(width),
        )  # fmt: skip
        return grad_rows, None, grad_weights.to(weights.dtype)


def permute(x: Tensor, experts: Tensor, num_experts: int) -> Permutation:
    """Return a copy of each token for each of its experts, sorted by expert; order is stable."""
    flat = experts.flatten()
    # the fewer bits a number has, the fewer passes sorting takes
    narrow = flat.to(torch.uint8 if num_experts <= 256 else torch.int16)
    order = torch.sort(narrow, stable=True).indices
    counts = flat.new_zeros(num_experts).scatter_add_(0, flat, torch.ones_like(flat))
    rows: Tensor = _Copies.apply(x, order, experts.shape[1])
    return Permutation(rows, order, counts)


def unpermute(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Return each token's weighted sum of its experts' rows; weights (T, K)."""
    y: Tensor = _WeightedSum.apply(rows, order, weights)
    return y


def _supports_permute(x: Tensor, experts: Tensor, num_experts: int) -> str | None:
    if x.shape[-1] > WIDEST_ROW or num_experts > 1 << 15:
        return f"rows up to {WIDEST_ROW} wide and {1 << 15} experts only"
    if not experts.numel():
        return "no tokens"
    return reason_against(x)


def _supports_unpermute(rows: Tensor, order: Tensor, weights: Tensor) -> str | None:
    del order
    if rows.shape[-1] > WIDEST_ROW:
        return f"rows up to {WIDEST_ROW} wide only"
    return reason_against(rows, weights)


# --- the router ------------------------------------------------------------------------------


@triton.jit
def _route(
    logits, correction, weights, experts, scores, num_tokens, num_experts, logits_step, scale,
    least, KIND: tl.constexpr, CHOICES: tl.constexpr, NORMALIZE: tl.constexpr,
    STEERED: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    expert, slot = tl.arange(0, EXPERTS), tl.arange(0, SLOTS)
    there = (token < num_tokens)[:, None] & (expert < num_experts)[None, :]
    at = token[:, None] * logits_step + expert[None, :]
    x = tl.load(logits + at, mask=there, other=float("-inf")).to(tl.float32)
    if KIND == 1:
        s = 1.0 / (1.0 + tl.exp(-x))
    else:
        top = tl.max(x, 1)
        top = tl.where(top == float("-inf"), 0.0, top)
        s = tl.exp(x - top[:, None])
        total = tl.sum(s, 1)
        s = s / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(scores + token[:, None] * num_experts + expert[None, :], s, mask=there)
    steered = x if KIND == 2 else s
    if STEERED:
        push = tl.load(correction + expert, mask=expert < num_experts, other=0.0)
        steered += push.to(tl.float32)[None, :]
    steered = tl.where(there, steered, float("-inf"))
    chosen = tl.zeros((TOKENS, SLOTS), tl.int32)
    taken = tl.zeros((TOKENS, SLOTS), tl.float32)
    for choice in tl.static_range(CHOICES):
        best = tl.argmax(steered, 1)
        here = expert[None, :] == best[:, None]
        value = tl.sum(tl.where(here, x if KIND == 2 else s, 0.0), 1)
        chosen = tl.where(slot[None, :] == choice, best[:, None], chosen)
        taken = tl.where(slot[None, :] == choice, value[:, None], taken)
        steered = tl.where(here, float("-inf"), steered)
    kept = (slot < CHOICES)[None, :]
    if KIND == 2:
        top = tl.max(tl.where(kept, taken, float("-inf")), 1)
        taken = tl.where(kept, tl.exp(taken - top[:, None]), 0.0)
        taken = taken / tl.sum(taken, 1)[:, None]
    elif NORMALIZE:
        total = tl.maximum(tl.sum(tl.where(kept, taken, 0.0), 1), least)
        taken = taken / total[:, None]
    out = token[:, None] * CHOICES + slot[None, :]
    mask = kept & (token < num_tokens)[:, None]
    tl.store(weights + out, taken * scale, mask=mask)
    tl.store(experts + out, chosen.to(tl.int64), mask=mask)


@triton.jit
def _route_backward(
    grad_weights, grad_scores, scores, experts, weights, grad, num_tokens, num_experts, scale,
    least, KIND: tl.constexpr, CHOICES: tl.constexpr, NORMALIZE: tl.constexpr,
    HAS_SCORES: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    inside = token < num_tokens
    there = inside[:, None] & (expert < num_experts)[None, :]
    at = token[:, None] * num_experts + expert[None, :]
    s = tl.load(scores + at, mask=there, other=0.0)
    of_scores = tl.zeros((TOKENS, EXPERTS), tl.float32)
    if HAS_SCORES:
        of_scores += tl.load(grad_scores + at, mask=there, other=0.0)
    total = tl.zeros((TOKENS,), tl.float32)
    pull = tl.zeros((TOKENS,), tl.float32)
    for choice in tl.static_range(CHOICES):
        place = token * CHOICES + choice
        own = tl.load(experts + place, mask=inside, other=0)
        g = tl.load(grad_weights + place, mask=inside, other=0.0)
        pull += g * tl.load(weights + place, mask=inside, other=0.0)
        total += tl.sum(tl.where(expert[None, :] == own[:, None], s, 0.0), 1)
    free = total > least  # else the sum is held at its least, and moves with nothing
    total = tl.maximum(total, least)
    of_logits = tl.zeros((TOKENS, EXPERTS), tl.float32)
    for choice in tl.static_range(CHOICES):
        place = token * CHOICES + choice
        own = tl.load(experts + place, mask=inside, other=0)
        g = tl.load(grad_weights + place, mask=inside, other=0.0)
        here = (expert[None, :] == own[:, None]) & inside[:, None]
        if KIND == 2:
            w = tl.load(weights + place, mask=inside, other=0.0)
            of_logits += tl.where(here, (w * (g - pull / scale))[:, None], 0.0)
        elif NORMALIZE:
            moved = (g * scale - tl.where(free, pull, 0.0)) / total
            of_scores += tl.where(here, moved[:, None], 0.0)
        else:
            of_scores += tl.where(here, (g * scale)[:, None], 0.0)
    if KIND == 1:
        of_logits += of_scores * s * (1.0 - s)
    else:
        of_logits += s * (of_scores - tl.sum(of_scores * s, 1)[:, None])
    tl.store(grad + at, of_logits, mask=there)


class _Router(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, correction: Tensor | None, router: RouterSpec, top: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_tokens, num_experts = logits.shape
        weights, scores = (
            torch.empty((num_tokens, n), dtype=torch.float32, device=logits.device)
            for n in (top, num_experts)
        )
        experts = torch.empty((num_tokens, top), dtype=torch.int64, device=logits.device)
        wide = power_of_two(num_experts)
        tokens = min(max(1, TILE // wide), power_of_two(triton.cdiv(num_tokens, UNITS)))
        options = {
            "KIND": SCORES[router.scores], "CHOICES": top, "NORMALIZE": router.normalize,
            "TOKENS": tokens, "EXPERTS": wide, "num_warps": 4,
        }  # fmt: skip
        numbers = (router.scale, router.normalize_min or 0.0)
        _route[(triton.cdiv(num_tokens, tokens),)](
            logits, logits if correction is None else correction, weights, experts, scores,
            num_tokens, num_experts, logits.stride(0), *numbers, **options,
            STEERED=correction is not None, SLOTS=power_of_two(top),
        )  # fmt: skip
        ctx.save_for_backward(scores, experts, weights)
        ctx.options, ctx.numbers, ctx.dtype = options, numbers, logits.dtype
        ctx.mark_non_differentiable(experts)
        ctx.set_materialize_grads(False)
        return weights, experts, scores

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        scores, experts, weights = ctx.saved_tensors
        of_weights, _, of_scores = gradients
        if of_weights is None and of_scores is None:
            return None, None, None, None
        if of_weights is None:
            of_weights = torch.zeros_like(weights)
        num_tokens, num_experts = scores.shape
        grad = torch.empty(scores.shape, dtype=ctx.dtype, device=scores.device)
        _route_backward[(triton.cdiv(num_tokens, ctx.options["TOKENS"]),)](
            of_weights.contiguous(), scores if of_scores is None else of_scores.contiguous(),
            scores, experts, weights, grad, num_tokens, num_experts, *ctx.numbers, **ctx.options,
            HAS_SCORES=of_scores is not None,
        )  # fmt: skip
        return grad, None, None, None


def route(
    logits: Tensor, router: RouterSpec, top: int, correction: Tensor | None = None
) -> Routing:
    """Return each token's `top` experts by its router logits (T, E)."""
    return Routing(*_Router.apply(logits, correction, router, top))


def _supports_route(
    logits: Tensor, router: RouterSpec, top: int, correction: Tensor | None = None
) -> str | None:
    if router.groups > 1:
        return "no groups of experts"
    if router.scores not in SCORES:
        return f"no scores by {router.scores}"
    if logits.shape[1] > MOST_EXPERTS or top > 32:
        return f"up to {MOST_EXPERTS} experts, 32 of them chosen, only"
    if router.scores == "topk_softmax" and correction is not None:
        return "no correction of chosen logits"
    return reason_against(logits)


IMPLEMENTATIONS = (
    Implementation(
        operator="permute", name="triton", function=permute, devices=("cuda",),
        supports=_supports_permute, rank=20, needs="triton",
    ),
    Implementation(
        operator="unpermute", name="triton", function=unpermute, devices=("cuda",),
        supports=_supports_unpermute, rank=20, needs="triton",
    ),
    Implementation(
        operator="route", name="triton", function=route, devices=("cuda",),
        supports=_supports_route, rank=20, needs="triton",
    ),
)  # fmt: skip
