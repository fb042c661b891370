"""Reads a checkpoint into a model: only the slices that this rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from tutti.errors import InputError
from tutti.nn.model import Model


class Checkpoint(Protocol):
    """Tensors by their logical names, as `tutti.huggingface.open_checkpoint` gives them."""

    def names(self) -> tuple[str, ...]:
        """Return the names of all tensors."""

    def read(self, name: str, slices: Sequence[slice] | None = None) -> Tensor:
        """Return a tensor, or a slice of it."""


@torch.no_grad()
def load(model: Model, checkpoint: Checkpoint) -> None:
    """Fill every parameter; numbers are rounded to the model's dtype."""
    known = set(checkpoint.names())
    for logical in model.logical_tensors():
        if logical.name not in known:
            raise InputError(f"{model.spec.name}: the checkpoint has no tensor '{logical.name}'")
        stored = checkpoint.read(logical.name, logical.slices)
        if stored.shape != logical.view.shape:
            raise InputError(
                f"{model.spec.name}: tensor '{logical.name}': expected "
                f"{list(logical.view.shape)}, found {list(stored.shape)}"
            )
        logical.view.copy_(stored)
