"""Hugging Face folders at both ends of a run.

A checkpoint is read here as the weights of a model, by one process and without torch.distributed,
so that the machinery of `tutti convert` writes it as a Hugging Face folder, block by block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tutti.document import Place, build
from tutti.errors import DamagedError, InputError
from tutti.huggingface import Checkpoint, open_checkpoint
from tutti.huggingface.checkpoint import StoredFile
from tutti.huggingface.conversion import Conversion, export
from tutti.huggingface.dtypes import BY_NAME, Dtype
from tutti.huggingface.pieces import Bounds
from tutti.huggingface.side_files import plain_paths
from tutti.huggingface.surgery.scores import scoring_texts
from tutti.huggingface.tensor_file import Raw
from tutti.huggingface.tensors import to_raw
from tutti.models.spec import ModelSpec
from tutti.ownership.rectangles import Rectangle, intersection
from tutti.train.checkpoint.archive import read_tensor
from tutti.train.checkpoint.contents import StateKind
from tutti.train.checkpoint.folders import LATEST, resolve
from tutti.train.checkpoint.loading import load_weights
from tutti.train.checkpoint.manifest import MANIFEST, MODEL_FOLDER, damage, read_manifest
from tutti.train.checkpoint.storage import Chunk, Stored, read_metadata
from tutti.train.state.state import TORCH_DTYPES

if TYPE_CHECKING:
    from tutti.train.engine.engine import Engine

_MOST_CHUNKS = 4  # that are held: blocks of one tensor are read in order


class SavedModel(Checkpoint):
    """The weights of a training checkpoint, by our names."""

    def __init__(
        self, checkpoint: Path, *, like: Path | None = None, averaged: bool = False
    ) -> None:
        """Open a checkpoint; `like` holds config.json and the tokenizer where it has none.

        `averaged`: the mean of the weights of many steps, where it has one.
        """
        manifest = read_manifest(checkpoint)
        spec = build(ModelSpec, dict(manifest.model), Place(str(checkpoint / MANIFEST)))
        beside = like or checkpoint / MODEL_FOLDER
        if not (beside / "config.json").is_file():
            raise InputError(
                f"{checkpoint}: has no config.json of its model; name a folder that has one "
                "(like=…)"
            )
        super().__init__(beside, spec)
        self.checkpoint, self.manifest = checkpoint, manifest
        self._stored = read_metadata(checkpoint, manifest.files)
        self._averaged = averaged
        self._held: OrderedDict[Chunk, Tensor] = OrderedDict()

    def _tensor(self, name: str) -> Stored:
        key = f"{StateKind.WEIGHT}/{self.owner(name)}"
        mean = f"{StateKind.AVERAGE}/{self.owner(name)}"
        if self._averaged and mean in self._stored:  # of what is not trained there is none
            return self._stored[mean]
        if key not in self._stored:
            raise InputError(f"{self.checkpoint}: holds no weights of '{self.owner(name)}'")
        return self._stored[key]

    def dtype(self, name: str) -> Dtype:
        """Return the number format of a tensor, as it was saved."""
        return BY_NAME[str(self._tensor(name).dtype).removeprefix("torch.")]

    def raw(self, name: str, bounds: Bounds) -> Raw:
        """Return the bytes of a slice, from as many chunks as it meets."""
        tensor = self._tensor(name)
        wanted = Rectangle(
            tuple(start for start, _ in bounds), tuple(stop - start for start, stop in bounds)
        )
        out = torch.empty(wanted.sizes, dtype=tensor.dtype)
        for chunk in tensor.chunks:
            shared = intersection(chunk.rectangle, wanted)
            if shared is not None:
                source = self._chunk(chunk, tensor.dtype)
                part = source[shared.within(chunk.rectangle).slices]
                out[shared.within(wanted).slices] = part
        return to_raw(out, self.dtype(name))

    def _chunk(self, chunk: Chunk, dtype: torch.dtype) -> Tensor:
        if chunk in self._held:
            self._held.move_to_end(chunk)
            return self._held[chunk]
        values = torch.empty(chunk.rectangle.sizes, dtype=dtype)
        path = self.checkpoint / chunk.file
        with path.open("rb") as stream:
            read_tensor(stream, chunk.start, chunk.length, values, path)
        self._held[chunk] = values
        if len(self._held) > _MOST_CHUNKS:
            self._held.popitem(last=False)
        return values

    def drop(self) -> None:
        """Keep the few chunks that the next block may need."""

    @property
    def stored(self) -> Mapping[str, StoredFile]:
        """No Hugging Face files: the weights are new."""
        return {}

    @property
    def carried(self) -> Mapping[str, Dtype]:
        """None: a run keeps what it trains."""
        return {}

    def carried_raw(self, key: str) -> Raw:
        """Return the bytes of a carried tensor: there is none."""
        raise InputError(f"{self.checkpoint}: holds no tensor '{key}'")

    def plain_files(self) -> tuple[str, ...]:
        """Return the files beside the weights: config, tokenizer."""
        names = (path.relative_to(self.folder).as_posix() for path in plain_paths(self.folder))
        return tuple(name for name in names if not _is_weights(name))

    def identity(self) -> object:
        """Return what tells this checkpoint from another."""
        return {"checkpoint": self.manifest.plan_hash, "serial": self.manifest.serial}


def _is_weights(name: str) -> bool:
    from tutti.huggingface.hf_folder import is_weights

    return is_weights(name)


def export_hf(
    checkpoint: Path,
    target: Path,
    *,
    like: Path | None = None,
    dtype: Dtype | None = None,
    averaged: bool = False,
    progress: Callable[[str, int, int], None] = lambda _doing, _done, _whole: None,
) -> Conversion:
    """Write a checkpoint, or the latest of a run's folder, as a Hugging Face folder.

    Weights are rounded to `dtype`, which is the one that the run computed with if none is given.
    """
    if not (checkpoint / MANIFEST).is_file():
        checkpoint = resolve(checkpoint, LATEST)[0]
    problem = damage(checkpoint, thorough=True)
    if problem is not None:
        raise DamagedError(problem)
    source = SavedModel(checkpoint, like=like, averaged=averaged)
    kept = TORCH_DTYPES[source.manifest.precision.parameters]
    wanted = dtype or BY_NAME[str(kept).removeprefix("torch.")]
    texts = scoring_texts(source, wanted)
    return export(source, target, dtype=wanted, texts=texts, progress=progress)


def load_hf(engine: Engine, folder: Path, *, seed: int = 0) -> None:
    """Begin with the weights of a Hugging Face or tutti folder: a rank reads its own slices.

    Afterwards the masters hold them as precisely as the folder does: `take_masters` must not be
    called.
    """
    load_weights(engine, open_checkpoint(folder), seed=seed)
