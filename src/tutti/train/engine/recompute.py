"""Parts of a forward pass that are thrown away and computed again before their backward.

`Again` runs a function without keeping what its backward needs, only its inputs; `recompute` runs
it once more with gradients, at the moment that the Plan's Recompute instruction says; backward then
goes through that second run. Used for whole units and for the core of attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor

from tutti.accelerator.operators import Operators

Function = Callable[..., tuple[Tensor, ...]]


class Again:
    """One call whose inside is recomputed; `tensors` are what gradients are wanted for."""

    def __init__(self, function: Function, tensors: tuple[Tensor, ...]) -> None:
        self._function = function
        self._inputs = tensors
        self._second: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None = None

    def first(self) -> tuple[Tensor, ...]:
        """Run it, keeping the inputs only; the results lead backward through the second run."""
        results: tuple[Tensor, ...] = _Again.apply(self, *self._inputs)
        return results

    def recompute(self) -> None:
        """Run it again, with gradients."""
        if self._second is None:
            leaves = tuple(t.detach().requires_grad_(t.requires_grad) for t in self._inputs)
            with torch.enable_grad():
                self._second = (leaves, self._function(*leaves))

    def backward(self, gradients: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """Return the inputs' gradients; those of parameters are added where they lie."""
        self.recompute()
        assert self._second is not None
        leaves, results = self._second
        pairs = [
            (result, gradient)
            for result, gradient in zip(results, gradients, strict=True)
            if gradient is not None and result.requires_grad
        ]
        torch.autograd.backward([r for r, _ in pairs], [g for _, g in pairs])
        self._second, self._inputs = None, ()
        return [leaf.grad for leaf in leaves]

    def run_without_gradients(self) -> tuple[Tensor, ...]:
        """Run the function alone."""
        with torch.no_grad():
            return self._function(*self._inputs)


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, again: Again, *tensors: Tensor) -> tuple[Tensor, ...]:
        del tensors  # the caller's own: kept by `again`, here only to connect the graph
        ctx.again = again
        return again.run_without_gradients()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        again: Again = ctx.again
        return (None, *again.backward(gradients))


class SelectiveOperators:
    """Operators whose attention is recomputed: what selective recomputation means.

    Calls made inside `recording` are noted there, so that they can be computed again in time.
    """

    def __init__(self, operators: Operators) -> None:
        self._operators = operators
        self._recording: list[list[Again]] = []  # the innermost last

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operators, name)

    def narrowed(self) -> Self:
        """Return the same with products of 8 bits; what is noted, both note at one place."""
        made = type(self)(self._operators.narrowed())
        made._recording = self._recording
        return made

    @contextmanager
    def recording(self, notes: list[Again]) -> Iterator[None]:
        """Note calls of attention for later."""
        self._recording.append(notes)
        try:
            yield
        finally:
            self._recording.pop()

    def attention(self, q: Tensor, k: Tensor, v: Tensor, segments: Any, **options: Any) -> Tensor:
        """Return attention, keeping queries, keys and values only."""
        if not self._recording or not torch.is_grad_enabled():
            return self._operators.attention(q, k, v, segments, **options)
        sinks = options.pop("sinks", None)

        def core(*tensors: Tensor) -> tuple[Tensor, ...]:
            own = dict(options) if sinks is None else {**options, "sinks": tensors[3]}
            return (self._operators.attention(tensors[0], tensors[1], tensors[2], segments, **own),)

        return self._noted(core, (q, k, v) if sinks is None else (q, k, v, sinks))[0]

    def attention_with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Return attention over a part of the keys, likewise."""
        if not self._recording or not torch.is_grad_enabled():
            return self._operators.attention_with_lse(q, k, v, segments, **options)

        def core(*tensors: Tensor) -> tuple[Tensor, ...]:
            q, k, v = tensors
            return self._operators.attention_with_lse(q, k, v, segments, **options)

        y, lse = self._noted(core, (q, k, v))
        return y, lse

    def _noted(self, core: Function, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        again = Again(core, tensors)
        self._recording[-1].append(again)
        return again.first()
