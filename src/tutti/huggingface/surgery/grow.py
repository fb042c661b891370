"""More tokens: the embedding and the head get rows, each the mean of those that are there.

A new row at the mean neither draws attention nor probability to itself before it is trained, which
random rows do (Hewitt 2021).
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tutti.errors import InputError
from tutti.huggingface.checkpoint import Checkpoint
from tutti.huggingface.conversion import Conversion, Progress, export
from tutti.huggingface.folders import open_checkpoint
from tutti.huggingface.pieces import Bounds, whole
from tutti.huggingface.surgery.changed import Changed, config_of
from tutti.huggingface.tensor_file import Raw
from tutti.huggingface.tensors import to_raw, to_torch
from tutti.models import ModelSpec, read_config

_ROWS = 4096  # looked at together


class _Grown(Changed):
    """Tensors that have more rows than the inner checkpoint's end with its mean row."""

    def __init__(self, inner: Checkpoint, spec: ModelSpec) -> None:
        super().__init__(inner, spec)
        self._means: dict[str, torch.Tensor] = {}

    def raw(self, name: str, bounds: Bounds) -> Raw:
        """Return the bytes of a slice."""
        name = self.owner(name)
        rows = self.inner.parameter(name).shape[0] if bounds else 0
        if not bounds or bounds[0][1] <= rows:
            return self.inner.raw(name, bounds)
        (start, stop), rest = bounds[0], bounds[1:]
        dtype = self.dtype(name)
        mean = self._mean(name)[tuple(slice(*bound) for bound in rest)]
        added = mean.expand(stop - max(start, rows), *mean.shape).to(getattr(torch, dtype.name))
        if start >= rows:
            return to_raw(added, dtype)
        held = to_torch(self.inner.raw(name, ((start, rows), *rest)), dtype)
        return to_raw(torch.cat((held, added)), dtype)

    def _mean(self, name: str) -> torch.Tensor:
        if name not in self._means:
            rows, *rest = self.inner.parameter(name).shape
            total = torch.zeros(rest, dtype=torch.float64)
            for start in range(0, rows, _ROWS):
                bounds = ((start, min(rows, start + _ROWS)), *whole(rest))
                total += to_torch(self.inner.raw(name, bounds), self.dtype(name)).double().sum(0)
                self.inner.drop()
            self._means[name] = total / rows
        return self._means[name]

    def identity(self) -> object:
        """Return plain values that change when the stored weights do."""
        return [self.inner.identity(), self.spec.vocab]


def grow(
    folder: Path,
    target: Path,
    *,
    vocabulary: int,
    progress: Progress = lambda _doing, _done, _whole: None,
) -> Conversion:
    """Write a model with a larger vocabulary."""
    inner = open_checkpoint(folder)
    config = config_of(inner)
    if vocabulary <= inner.spec.vocab:
        raise InputError(
            f"{folder}: its vocabulary has {inner.spec.vocab} rows already; --vocabulary is "
            f"{vocabulary} and must be above that"
        )
    changed = {**config, "vocab_size": vocabulary}
    spec = read_config(changed, inner.spec.name, str(folder / "config.json"))
    texts = {"config.json": json.dumps(changed, indent=2) + "\n"}
    return export(_Grown(inner, spec), target, texts=texts, progress=progress)
