"""Where the gradients of a step's micro-batches add up: sums as large as the stored parameters.

A weight pass adds its product straight onto such a sum. Tensors that stand in one parameter (query,
key and value) have one sum, of which each has its part.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from tutti.train.state.state import SpanState


@dataclass(frozen=True, slots=True)
class _Place:
    """The tensors of a stored parameter in a span."""

    state: SpanState
    blocks: tuple[int, ...]  # in the order in which they stand in the parameter


class Sums:
    """The sums of one rank's parameters."""

    def __init__(self, states: Iterable[SpanState], *, several: bool) -> None:
        """Prepare the sums; with one micro-batch (not `several`) a gradient needs none."""
        self._several = several
        by_owner: dict[int, list[tuple[SpanState, int]]] = {}
        for state in states:
            for i, owner in enumerate(state.owners):
                by_owner.setdefault(id(owner), []).append((state, i))
        self._places = {
            owner: place for owner, parts in by_owner.items() if (place := _place(parts))
        }

    def of(self, weight: Tensor) -> Tensor | None:
        """Return the sum of a parameter; None where its gradients go another way."""
        place = self._places.get(id(weight)) if self._several else None
        return None if place is None else place.state.sum_of(place.blocks, weight.shape)


def _place(parts: list[tuple[SpanState, int]]) -> _Place | None:
    """Return where a parameter's sum lies; None if its tensors lie in several places."""
    state = parts[0][0]
    if any(other is not state for other, _ in parts):
        return None
    blocks = state.whole([i for _, i in parts])
    return None if blocks is None else _Place(state, blocks)
