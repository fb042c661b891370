"""Weight gradients that a backward pass leaves for later.

A zero-bubble schedule runs backward in two parts: the gradient of the input, which the stage before
waits for, and that of the weights, which nobody waits for. With a `WeightGradients` at hand, the
linear operators put their weight part there instead of computing it; `run` computes what was put.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch


class WeightGradients:
    """A queue of weight gradients yet to be computed."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[torch.Tensor, Callable[[], torch.Tensor]]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def defer(self, weight: torch.Tensor, compute: Callable[[], torch.Tensor]) -> None:
        """Keep `compute`, which returns a gradient of `weight`, for later."""
        if weight.requires_grad:
            self._waiting.append((weight, compute))

    @torch.no_grad()
    def run(self) -> None:
        """Compute everything that waits and add it to the weights' gradients."""
        while self._waiting:
            weight, compute = self._waiting.popleft()
            accumulate(weight, compute())


def accumulate(weight: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add to the gradient of a weight, as autograd would."""
    gradient = gradient.to(weight.dtype).reshape(weight.shape)
    weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
