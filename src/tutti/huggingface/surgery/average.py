"""The weighted mean of several checkpoints of one model ("model soup", or the end of a run)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from tutti.errors import InputError
from tutti.huggingface.checkpoint import Checkpoint
from tutti.huggingface.conversion import Conversion, Progress, export
from tutti.huggingface.folders import open_checkpoint
from tutti.huggingface.pieces import Bounds
from tutti.huggingface.surgery.changed import Changed
from tutti.huggingface.tensor_file import Raw
from tutti.huggingface.tensors import to_raw, to_torch


class _Averaged(Changed):
    """Each number is the mean of all checkpoints'; formats and files are the first one's."""

    def __init__(self, checkpoints: Sequence[Checkpoint], shares: Sequence[float]) -> None:
        super().__init__(checkpoints[0], checkpoints[0].spec)
        self._all, self._shares = checkpoints, shares

    def raw(self, name: str, bounds: Bounds) -> Raw:
        """Return the bytes of a slice."""
        total: torch.Tensor | None = None
        for checkpoint, share in zip(self._all, self._shares, strict=True):
            own = to_torch(checkpoint.raw(name, bounds), checkpoint.dtype(name)).double() * share
            total = own if total is None else total.add_(own)
        assert total is not None
        dtype = self.dtype(name)
        return to_raw(total.to(getattr(torch, dtype.name)), dtype)

    def drop(self) -> None:
        """Give back the memory of files that were looked at."""
        for checkpoint in self._all:
            checkpoint.drop()

    def identity(self) -> object:
        """Return plain values that change when the stored weights do."""
        return [[c.identity() for c in self._all], list(self._shares)]


def average(
    folders: Sequence[Path],
    target: Path,
    *,
    weights: Sequence[float] = (),
    progress: Progress = lambda _doing, _done, _whole: None,
) -> Conversion:
    """Write the mean of several model folders; without weights, all count alike."""
    if len(folders) < 2:
        raise InputError(f"an average needs two folders or more; {len(folders)} given")
    if weights and len(weights) != len(folders):
        raise InputError(f"{len(weights)} weights for {len(folders)} folders; give one of each")
    whole = sum(weights)
    if any(not 0 <= weight < math.inf for weight in weights) or (weights and whole <= 0):
        raise InputError("weights are numbers from 0 on, and one of them is above 0")
    shares = [weight / whole for weight in weights] or [1 / len(folders)] * len(folders)
    checkpoints = [open_checkpoint(folder) for folder in folders]
    for other in checkpoints[1:]:
        _check_alike(checkpoints[0], other)
    return export(_Averaged(checkpoints, shares), target, progress=progress)


def _check_alike(first: Checkpoint, other: Checkpoint) -> None:
    if first.names() != other.names():
        odd = sorted(set(first.names()) ^ set(other.names()))
        raise InputError(
            f"{other.folder}: is no checkpoint of the model in {first.folder}: only one of them "
            f"has tensor '{odd[0]}'"
        )
    for name in first.names():
        shapes = first.parameter(name).shape, other.parameter(name).shape
        if shapes[0] != shapes[1]:
            raise InputError(
                f"{other.folder}: is no checkpoint of the model in {first.folder}: tensor "
                f"'{name}' is {list(shapes[1])} there and {list(shapes[0])} here"
            )
    if first.spec.fingerprint != other.spec.fingerprint:
        raise InputError(
            f"{other.folder}: its config.json says another computation than {first.folder}'s; "
            "only checkpoints of one model have a mean"
        )
