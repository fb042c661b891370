"""Passes that compute nothing: right-shaped tensors for real messages.

With the declared time of an emulated chip this measures schedules and plans on a machine that could
not compute them as fast: stages hand real tensors to each other, gradients are really reduced, but
an operator is a wait. Collectives inside a block are part of the block's time, so they are not run
either. Losses and gradients are zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tutti.models.spec import ModelSpec
from tutti.nn.batch import Batch
from tutti.nn.parallel.groups import shares
from tutti.ranks.rank_places import Seat


class StubPasses:
    """The units of one rank as nothing but shapes."""

    def __init__(
        self, spec: ModelSpec, seat: Seat, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._spec, self._seat, self._dtype, self._device = spec, seat, dtype, device
        self.streams: dict[tuple[int, int], Tensor] = {}
        self.gradients: dict[tuple[int, int], Tensor] = {}
        self.totals: dict[str, Tensor] = {}
        self.logps: dict[int, Tensor] = {}  # of answers: none
        self.loss_scale = 1.0
        self._in_flight: set[tuple[int, int]] = set()  # unit, micro-batch
        self._counts: dict[int, int] = {}  # micro-batch → this rank's tokens of it

    def begin_step(self, loss_scale: float) -> None:
        """Check that the step before came to its end."""
        if self._in_flight or self.streams or self.gradients:
            raise RuntimeError(f"a step left {len(self._in_flight)} passes unfinished")
        self.loss_scale = loss_scale

    def forward(self, start: int, stop: int, micro_batch: int, batch: Batch) -> None:
        """Hand a stream of the right shape upwards."""
        if start:
            self.streams.pop((start, micro_batch))
        self._in_flight |= {(unit, micro_batch) for unit in range(start, stop)}
        self._counts[micro_batch] = self._own_tokens(batch)
        if stop <= self._spec.head_unit:
            self.streams[stop, micro_batch] = self._rows(micro_batch)

    def _own_tokens(self, batch: Batch) -> int:
        group = self._seat.tensor
        if not self._seat.sequence_parallel:
            return batch.num_tokens
        return shares(batch.num_tokens, group.size)[group.rank]

    def _rows(self, micro_batch: int) -> Tensor:
        shape = (self._counts[micro_batch], self._spec.hidden)
        return torch.zeros(shape, dtype=self._dtype, device=self._device)

    def forget(self, units: range, micro_batch: int) -> None:
        """Drop a forward pass that no backward follows."""
        self._in_flight -= {(unit, micro_batch) for unit in units}

    def recompute(self, start: int, stop: int, micro_batch: int) -> None:
        """Nothing was thrown away."""

    def backward_input(self, start: int, stop: int, micro_batch: int) -> None:
        """Hand a gradient of the right shape downwards."""
        if stop <= self._spec.head_unit:
            self.gradients.pop((stop, micro_batch))
        if start:
            self.gradients[start, micro_batch] = self._rows(micro_batch)

    def backward_weight(self, start: int, stop: int, micro_batch: int) -> frozenset[int]:
        """Forget the pass; gradients stay zeros."""
        self._in_flight -= {(unit, micro_batch) for unit in range(start, stop)}
        return frozenset()

    def fetch_activations(self, units: range, micro_batch: int) -> None:
        """Nothing is away."""

    def offload_activations(self, units: range, micro_batch: int) -> None:
        """There is nothing to keep."""
