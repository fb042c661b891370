"""`Checkpoint`: the weights of a model by our names, wherever and however they are stored.

The same few calls work on a Hugging Face folder (through its weight map) and on a tutti folder;
both are lazy: opening reads headers, a slice reads its own bytes. Below `read` everything is bytes
in numpy; torch comes in at the last step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tutti.errors import InputError, hint
from tutti.huggingface.dtypes import Dtype
from tutti.huggingface.pieces import Bounds, whole
from tutti.huggingface.tensor_file import Raw
from tutti.models import ModelSpec, Parameter

if TYPE_CHECKING:
    import torch


class TensorInfo(NamedTuple):
    """What is known of a tensor without reading it; `dtype` as torch calls it."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """One safetensors file of a Hugging Face checkpoint: its keys in their order."""

    tensors: tuple[str, ...]
    metadata: Mapping[str, str]


class Checkpoint(ABC):
    """The weights of one model."""

    folder: Path
    spec: ModelSpec

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        self.folder, self.spec = folder, spec
        self._parameters: dict[str, Parameter] = {
            f"{unit}.{parameter.name}": parameter
            for unit in range(spec.num_units)
            for parameter in spec.parameters(unit)
        }

    def names(self) -> tuple[str, ...]:
        """Return the names of all tensors, tied ones too, in the order of their units."""
        return tuple(self._parameters)

    def parameter(self, name: str) -> Parameter:
        """Return what the model says of a tensor."""
        if name not in self._parameters:
            raise InputError(f"{self.folder}: no tensor '{name}'; {hint(name, self._parameters)}")
        return self._parameters[name]

    def info(self, name: str) -> TensorInfo:
        """Return a tensor's number format and shape."""
        return TensorInfo(self.dtype(name).name, self.parameter(name).shape)

    def read(self, name: str, slices: Sequence[slice] | None = None) -> torch.Tensor:
        """Return a tensor, or a slice of it, in memory of its own."""
        from tutti.huggingface.tensors import to_torch

        return to_torch(self.raw(name, self._bounds(name, slices)), self.dtype(name))

    def _bounds(self, name: str, slices: Sequence[slice] | None) -> Bounds:
        shape = self.parameter(name).shape
        if slices is None:
            return whole(shape)
        if len(slices) > len(shape):
            raise InputError(f"'{name}' has {len(shape)} dimensions; {len(slices)} slices given")
        bounds = []
        for size, cut in zip(shape, (*slices, *[slice(None)] * len(shape)), strict=False):
            start, stop, step = cut.indices(size)
            if step != 1:
                raise InputError(f"'{name}': a slice has the step {step}; only 1 can be read")
            bounds.append((start, max(start, stop)))
        return tuple(bounds)

    def owner(self, name: str) -> str:
        """Return the name under which a tensor is stored: its own, or the one it is tied to."""
        return self.parameter(name).tied_to or name

    # --- bytes -----------------------------------------------------------------------------

    @abstractmethod
    def dtype(self, name: str) -> Dtype:
        """Return the number format of a tensor."""

    @abstractmethod
    def raw(self, name: str, bounds: Bounds) -> Raw:
        """Return the bytes of a slice, in memory of their own."""

    @abstractmethod
    def drop(self) -> None:
        """Give back the memory of files that were looked at."""

    # --- what else the folder holds --------------------------------------------------------

    @property
    @abstractmethod
    def stored(self) -> Mapping[str, StoredFile]:
        """The Hugging Face files that the weights came in; empty if they never were in any."""

    @property
    @abstractmethod
    def carried(self) -> Mapping[str, Dtype]:
        """Stored tensors that the model does not need, by their keys in the files."""

    @abstractmethod
    def carried_raw(self, key: str) -> Raw:
        """Return the bytes of a carried tensor."""

    @abstractmethod
    def plain_files(self) -> tuple[str, ...]:
        """Return the files beside the weights: config, tokenizer, generation settings."""

    @abstractmethod
    def identity(self) -> object:
        """Return plain values that change when the stored weights do."""
