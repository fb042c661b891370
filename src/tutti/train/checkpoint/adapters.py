"""Adapters at the end of a run: the folders that they end in.

A run with adapters saves what it trains; the frozen weights are read from the model's folder again.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from tutti.errors import DamagedError, InputError
from tutti.huggingface import open_checkpoint
from tutti.huggingface.conversion import Conversion, export
from tutti.huggingface.peft.merging import MergedModel
from tutti.huggingface.peft.writing import write_adapter
from tutti.huggingface.surgery.scores import ScoringBase, scoring_texts
from tutti.huggingface.tensors import to_torch
from tutti.train.checkpoint.folders import LATEST, resolve
from tutti.train.checkpoint.huggingface import SavedModel
from tutti.train.checkpoint.manifest import MANIFEST, damage


def trained_tensors(
    checkpoint: Path, like: Path | None = None
) -> tuple[SavedModel, dict[str, Tensor]]:
    """Return what a run has trained, by our names, from a checkpoint or a run's latest."""
    if not (checkpoint / MANIFEST).is_file():
        checkpoint = resolve(checkpoint, LATEST)[0]
    problem = damage(checkpoint, thorough=True)
    if problem is not None:
        raise DamagedError(problem)
    saved = SavedModel(checkpoint, like=like)
    if saved.spec.tuning is None or saved.spec.tuning.adapter is None:
        raise InputError(f"{checkpoint}: is of a whole model and has no adapters")
    tensors = {}
    for name in saved.names():
        parameter = saved.parameter(name)
        if parameter.trainable and parameter.tied_to is None:
            bounds = tuple((0, size) for size in parameter.shape)
            tensors[name] = to_torch(saved.raw(name, bounds), saved.dtype(name))
    return saved, tensors


def export_adapter(checkpoint: Path, target: Path, *, base: Path, like: Path | None = None) -> Path:
    """Write a checkpoint's adapters as a folder that `peft` loads."""
    saved, tensors = trained_tensors(checkpoint, like)
    write_adapter(target, saved.spec, tensors, base=str(base.resolve()))
    return target


def export_merged(
    checkpoint: Path, target: Path, *, base: Path, like: Path | None = None
) -> Conversion:
    """Write the base with a checkpoint's adapters added to it, as a Hugging Face folder."""
    saved, tensors = trained_tensors(checkpoint, like)
    inner = open_checkpoint(base)
    if saved.spec.head.scores and not inner.spec.head.scores:
        inner = ScoringBase(inner)
    merged = MergedModel(inner, saved.spec, tensors)
    return export(merged, target, texts=scoring_texts(merged))
