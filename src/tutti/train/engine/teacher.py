"""A teacher beside a model's head: whole on the ranks of the last stage, sliced as the head is.

It runs forward only, on the tokens that the head sees; of its own experts each rank has all, sliced
by the tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tutti.accelerator.operators import Operators
from tutti.accelerator.reference.distilled import Told, most_probable
from tutti.errors import InputError
from tutti.models import ModelSpec
from tutti.models.distillation import Distillation
from tutti.nn.batch import Batch
from tutti.nn.model import Model
from tutti.nn.parallel.groups import ParallelContext, Ranks


class Teacher:
    """A model that tells what it expects; `model` is to be filled by whoever makes it."""

    def __init__(
        self,
        spec: ModelSpec,
        how: Distillation,
        operators: Operators,
        parallel: ParallelContext,
        *,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        problem = spec.tensor_parallel_problem(parallel.tensor.size)
        if problem is not None:
            raise InputError(f"distillation: the teacher lies beside the head, and {problem}")
        self.how, self.tensor = how, parallel.tensor
        beside = Ranks(tensor=parallel.tensor, context=parallel.context)
        self.model = Model(spec, operators, parallel=beside, dtype=dtype, device=device)
        self.model.requires_grad_(requires_grad=False)

    @torch.no_grad()
    def told(self, batch: Batch) -> Callable[[slice], Told]:
        """Return what is told of any run of a batch's tokens."""
        seen = batch.seen_by(self.model.spec)
        stream, _ = self.model.stream(None, seen)
        head = self.model.head
        assert head is not None
        hidden = head.hidden(stream)

        def told(own: slice) -> Told:
            with torch.no_grad():
                logits = head.logits.own(hidden[own])
                if self.how.top_k is None:
                    return Told(logits_tv=logits)
                return most_probable(logits, self.how, head.logits.vocabulary, self._columns)

        return told

    def _columns(self, x: Tensor) -> Tensor:
        if self.tensor.size == 1:
            return x
        rows = [x.shape[1]] * self.tensor.size
        return self.tensor.all_gather(x.t().contiguous(), rows).t()


@dataclass(frozen=True, slots=True)
class StoredTaught:
    """What a teacher told earlier of a batch's tokens."""

    how: Distillation
    tokens_tk: Tensor
    logps_tk: Tensor

    def told(self, batch: Batch) -> Callable[[slice], Told]:
        """Return what is told of any run of the batch's tokens."""
        del batch  # the tokens that it was told of
        return lambda own: Told(
            tokens_tk=self.tokens_tk[own].long(), logps_tk=self.logps_tk[own].float()
        )
