"""Unit 0: token embedding, learned positions, projection, scale, norm."""

from __future__ import annotations

import torch
from torch import Tensor

from tutti.accelerator.gradients import WeightGradients
from tutti.models import ModelSpec
from tutti.nn.batch import Batch
from tutti.nn.linear import Linear
from tutti.nn.norm import Norm
from tutti.nn.parallel.collectives import leave
from tutti.nn.parallel.groups import ParallelContext, shares
from tutti.nn.storage import Holder, Maker


class TokenTable(Holder):
    """The rows of tokens; each tensor-parallel rank holds a part of the vocabulary.

    The row of `padding` is looked up like any other, but gets no gradient for it.
    """

    weight: Tensor

    def __init__(self, make: Maker, name: str = "token", *, padding: int | None = None) -> None:
        super().__init__()
        self.operators, self.parallel, self.padding = make.operators, make.parallel, padding
        self.hold("weight", make, f"{name}.weight")
        self.start: int = self.pieces["weight"][0].slices[0].start

    def forward(self, tokens_t: Tensor, later: WeightGradients | None = None) -> Tensor:
        """Return the tokens' rows, of this rank's tokens; a negative token has zeros."""
        if self.parallel.tensor.size == 1:
            return self._rows(tokens_t, later)
        local_t = tokens_t - self.start
        outside = (local_t < 0) | (local_t >= self.weight.shape[0])
        return leave(self._rows(local_t.masked_fill(outside, -1), later), self.parallel)

    def _rows(self, local_t: Tensor, later: WeightGradients | None) -> Tensor:
        """Return the rows of tokens, counted from this rank's first."""
        padding = -1 if self.padding is None else self.padding - self.start
        if not 0 <= padding < self.weight.shape[0]:
            return self.operators.embedding(local_t, self.weight, later=later)
        pads = local_t == padding
        rows = self.operators.embedding(local_t.masked_fill(pads, -1), self.weight, later=later)
        return torch.where(pads.unsqueeze(-1), self.weight.detach()[padding], rows)


class PositionTable(Holder):
    """Learned positions; whole on every rank."""

    weight: Tensor

    def __init__(self, make: Maker, offset: int) -> None:
        super().__init__()
        self.operators, self.parallel, self.offset = make.operators, make.parallel, offset
        self.hold("weight", make, "position.weight")

    def forward(self, positions_t: Tensor, later: WeightGradients | None = None) -> Tensor:
        """Return the rows of this rank's positions."""
        own = own_tokens(positions_t, self.parallel)
        return self.operators.embedding(own + self.offset, self.weight, later=later)


def own_tokens(x: Tensor, parallel: ParallelContext) -> Tensor:
    """Return this rank's rows of a tensor that every tensor-parallel rank has."""
    group = parallel.tensor
    if group.size == 1 or not parallel.sequence_parallel:
        return x
    rows = shares(x.shape[0], group.size)
    return x.narrow(0, sum(rows[: group.rank]), rows[group.rank])


class Embedding(Holder):
    """Tokens to the residual stream."""

    def __init__(self, make: Maker, model: ModelSpec) -> None:
        super().__init__()
        spec = model.embedding
        self.token = TokenTable(make, padding=spec.padding)
        self.project_in = Linear(make, "project_in") if spec.dim != model.hidden else None
        self.position = PositionTable(make, spec.position_offset) if spec.positions else None
        self.norm = Norm(make, "norm", spec.norm) if spec.norm is not None else None
        self.scale = float(torch.tensor(spec.scale, dtype=make.dtype))  # as Gemma rounds it

    def forward(self, batch: Batch, later: WeightGradients | None = None) -> Tensor:
        """Return (T, C), of this rank's tokens; with `later`, tables' gradients are left there."""
        x: Tensor = self.token(batch.tokens_t, later)
        if self.project_in is not None:
            x = self.project_in(x, later)
        if self.position is not None:
            x = x + self.position(batch.positions_t, later)
        if self.scale != 1.0:
            x = x * self.scale
        return x if self.norm is None else self.norm(x)
