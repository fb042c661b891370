"""Optimizers and the norm of gradients in plain torch, on many tensors at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSettings:
    """What is different for tensors of some names."""

    match: tuple[str, ...]  # patterns, as in a model's tuning
    rate: float = 1.0  # times the learning rate
    weight_decay: float | None = None  # None: as for all others


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageSettings:
    """A running mean of the weights: mean ← decay·mean + (1 − decay)·weight, every few steps."""

    decay: float
    every: int = 1
    start: int = 0  # steps in which it is the weights themselves

    def taken(self, step: int) -> float | None:
        """Return how much of the mean stays in a step, counted from 1; None: all of it."""
        if step <= self.start:
            return 0.0
        return self.decay if (step - self.start) % self.every == 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamSettings:
    """The constants of AdamW and of what stands in for it."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    decay_vectors: bool = False  # norms and biases, too; who calls sorts the tensors
    momentum: float = 0.95  # Muon's
    tensors: tuple[TensorSettings, ...] = ()  # the first that matches counts
    average: AverageSettings | None = None


@torch.no_grad()
def adamw(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    *,
    step: int,
    settings: AdamSettings,
    gradient_factor: Tensor | None = None,
    copies: Sequence[Tensor] | None = None,
) -> None:
    """Move the weights by one step, in place; `step` counts from 1.

    Gradients are multiplied by `gradient_factor` (clipping, token counts) on the way; a factor that
    is not a number leaves everything as it is, so that the host need not know whether gradients
    are finite. `copies` are the weights in the dtype that is computed with, where the weights are
    float32 masters.
    """
    counts = None if gradient_factor is None else ~gradient_factor.isnan()
    decay = 1.0 - settings.learning_rate * settings.weight_decay
    correction1 = 1.0 - settings.beta1**step
    correction2 = 1.0 - settings.beta2**step
    for i, weight in enumerate(weights):
        gradient = gradients[i].to(torch.promote_types(weight.dtype, torch.float32))
        if gradient_factor is not None:
            gradient = gradient * gradient_factor
        mean = torch.lerp(means[i].to(gradient.dtype), gradient, 1.0 - settings.beta1)
        square = squares[i].to(gradient.dtype) * settings.beta2
        square.addcmul_(gradient, gradient, value=1.0 - settings.beta2)
        put(means[i], mean, counts)
        put(squares[i], square, counts)
        root = square.sqrt().div_(correction2**0.5).add_(settings.eps)
        moved = weight.to(gradient.dtype) * decay
        moved.addcdiv_(mean, root, value=-settings.learning_rate / correction1)
        put(weight, moved, counts)
        if copies is not None:
            put(copies[i], weight, counts)


@torch.no_grad()
def lion(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    *,
    settings: AdamSettings,
    gradient_factor: Tensor,
) -> None:
    """Move the weights by the sign of a mean of gradients (Chen et al. 2023, Algorithm 2)."""
    counts = ~gradient_factor.isnan()
    for weight, gradient, mean in zip(weights, gradients, means, strict=True):
        wide = torch.promote_types(weight.dtype, torch.float32)
        own, before = gradient.to(wide) * gradient_factor, mean.to(wide)
        moved = weight.to(wide) * (1.0 - settings.learning_rate * settings.weight_decay)
        moved -= settings.learning_rate * torch.lerp(before, own, 1.0 - settings.beta1).sign()
        put(mean, torch.lerp(before, own, 1.0 - settings.beta2), counts)
        put(weight, moved, counts)


@torch.no_grad()
def sgd(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    *,
    settings: AdamSettings,
    gradient_factor: Tensor,
) -> None:
    """Move the weights against the gradients, or in any other direction that is given."""
    counts = ~gradient_factor.isnan()
    for weight, gradient in zip(weights, gradients, strict=True):
        wide = torch.promote_types(weight.dtype, torch.float32)
        moved = weight.to(wide) * (1.0 - settings.learning_rate * settings.weight_decay)
        moved -= settings.learning_rate * gradient_factor * gradient.to(wide)
        put(weight, moved, counts)


NEWTON_SCHULZ = (3.4445, -4.775, 2.0315)  # Jordan et al. 2024: steep at 0, singular values near 1


def orthogonal(x: Tensor, *, steps: int = 5, eps: float = 1e-7) -> Tensor:
    """Return a matrix (or several) with its singular values brought near 1 (Newton–Schulz)."""
    a, b, c = NEWTON_SCHULZ
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(eps)
    for _ in range(steps):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if tall else x


def put(target: Tensor, value: Tensor, counts: Tensor | None) -> None:
    """Write a value, unless it does not count; nobody waits to know."""
    if counts is None:
        target.copy_(value)
    elif value.dtype == target.dtype:
        torch.where(counts, value, target, out=target)  # one pass over memory
    else:
        target.copy_(torch.where(counts, value, target))


def squared_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of all elements, in float32 at least."""
    squares = [t.to(torch.promote_types(t.dtype, torch.float32)).square().sum() for t in tensors]
    return torch.stack(squares).sum() if squares else torch.zeros(())
