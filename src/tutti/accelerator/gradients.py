"""Weight gradients that a backward pass leaves for later.

A zero-bubble schedule runs backward in two parts: the gradient of the input, which the stage before
waits for, and that of the weights, which nobody waits for. With a `WeightGradients` at hand, the
linear operators put their weight part there instead of computing it; `run` computes what was put.
Where the gradients of several micro-batches add up in a wider sum, a product can go straight into
it: one pass over the weight's memory less, and no rounding in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

SumOf = Callable[[Tensor], Tensor | None]
"""Where the gradients of a weight add up; None: nowhere, a gradient is left with its weight."""


class Deferred(NamedTuple):
    """A gradient that is yet to be computed."""

    weight: Tensor
    compute: Callable[[], Tensor]
    write: Callable[[Tensor], object] | None  # straight into a tensor of the weight's shape
    add: Callable[[Tensor], object] | None  # straight onto a sum of the weight's shape

    def into(self, target: Tensor) -> None:
        """Compute the gradient into memory that is there already."""
        if self.write is not None and target.dtype == self.weight.dtype:
            self.write(target)
        else:
            target.copy_(self.compute().reshape(target.shape))

    def onto(self, total: Tensor) -> None:
        """Add the gradient to a sum, which may be of a wider dtype."""
        if self.add is not None:
            self.add(total)
        else:
            total.add_(self.compute().reshape(total.shape))


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
        add: Callable[[Tensor], object] | None = None,
    ) -> None:
        """Keep `compute`, which returns a gradient of `weight`, for later.

        `write` does the same into a tensor that it is given, `add` onto a sum of any dtype, where
        that saves a pass over memory.
        """
        if weight.requires_grad:
            self._waiting.append(Deferred(weight, compute, write, add))

    def take(self) -> list[Deferred]:
        """Return what waits, in order, and forget it: whoever takes it computes it."""
        taken = list(self._waiting)
        self._waiting.clear()
        return taken

    @torch.no_grad()
    def run(self, sum_of: SumOf | None = None) -> None:
        """Compute everything that waits and add it to the weights' sums, or else gradients."""
        while self._waiting:
            deferred = self._waiting.popleft()
            total = None if sum_of is None else sum_of(deferred.weight)
            if total is None:
                accumulate(deferred.weight, deferred.compute())
            else:
                deferred.onto(total)


def accumulate(weight: Tensor, gradient: Tensor) -> None:
    """Add to the gradient of a weight, as autograd would."""
    gradient = gradient.to(weight.dtype).reshape(weight.shape)
    weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
