"""Weight gradients that a backward pass leaves for later.

A zero-bubble schedule runs backward in two parts: the gradient of the input, which the stage before
waits for, and that of the weights, which nobody waits for. With a `WeightGradients` at hand, the
linear operators put their weight part there instead of computing it; `run` computes what was put.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Deferred(NamedTuple):
    """A gradient that is yet to be computed."""

    weight: Tensor
    compute: Callable[[], Tensor]
    write: Callable[[Tensor], object] | None  # straight into a tensor of the weight's shape

    def into(self, target: Tensor) -> None:
        """Compute the gradient into memory that is there already."""
        if self.write is not None and target.dtype == self.weight.dtype:
            self.write(target)
        else:
            target.copy_(self.compute().reshape(target.shape))


class WeightGradients:
    """A queue of weight gradients yet to be computed."""

    def __init__(self) -> None:
        self._waiting: deque[Deferred] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def defer(
        self,
        weight: Tensor,
        compute: Callable[[], Tensor],
        write: Callable[[Tensor], object] | None = None,
    ) -> None:
        """Keep `compute`, which returns a gradient of `weight`, for later.

        `write` does the same into a tensor that it is given, where that saves a copy.
        """
        if weight.requires_grad:
            self._waiting.append(Deferred(weight, compute, write))

    def take(self) -> list[Deferred]:
        """Return what waits, in order, and forget it: whoever takes it computes it."""
        taken = list(self._waiting)
        self._waiting.clear()
        return taken

    @torch.no_grad()
    def run(self) -> None:
        """Compute everything that waits and add it to the weights' gradients."""
        while self._waiting:
            deferred = self._waiting.popleft()
            accumulate(deferred.weight, deferred.compute())


def accumulate(weight: Tensor, gradient: Tensor) -> None:
    """Add to the gradient of a weight, as autograd would."""
    gradient = gradient.to(weight.dtype).reshape(weight.shape)
    weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
