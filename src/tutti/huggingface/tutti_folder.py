"""A tutti folder as a `Checkpoint`: our tensors under our names, whole or in parts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from tutti.errors import InputError
from tutti.huggingface.checkpoint import Checkpoint, StoredFile
from tutti.huggingface.dtypes import BY_NAME, Dtype
from tutti.huggingface.manifest import MANIFEST, Manifest, Tensor, part_key, read_manifest
from tutti.huggingface.pieces import Bounds
from tutti.huggingface.tensor_file import Raw, TensorFile
from tutti.models import load_model

_BLOCK_BYTES = 1 << 22


class TuttiFolder(Checkpoint):
    """The weights in a folder that `tutti convert` or a training run wrote."""

    def __init__(self, folder: Path) -> None:
        self.manifest: Manifest = read_manifest(folder)
        super().__init__(folder, load_model(f"{folder}/"))
        if self.manifest.model_hash != self.spec.fingerprint:
            raise InputError(
                f"{folder / 'config.json'}: describes a model with the hash "
                f"{self.spec.fingerprint}; the weights are of one with "
                f"{self.manifest.model_hash}: it was edited afterwards"
            )
        self._opened: dict[str, TensorFile] = {}
        self._check_files()
        self._check_tensors()

    def _check_files(self) -> None:
        for name in (*self.manifest.files, *self.manifest.huggingface):
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise InputError(
                    f"{self.folder / MANIFEST}: names '{name}', which is no file of this folder"
                )
        for name, file in self.manifest.files.items():
            path = self.folder / name
            if not path.is_file():
                raise InputError(f"{path}: is missing; {MANIFEST} lists it")
            size = path.stat().st_size
            if size != file.num_bytes:
                raise InputError(
                    f"{path}: expected {file.num_bytes} bytes, found {size}; copy it again"
                )

    def _check_tensors(self) -> None:
        stored = self.manifest.tensors
        for name, parameter in self._parameters.items():
            if parameter.tied_to is None and name not in stored:
                raise InputError(
                    f"{self.folder}: tensor '{name}' is missing; expected {list(parameter.shape)}"
                )
        for name, tensor in stored.items():
            shape = self._parameters[name].shape if name in self._parameters else None
            if shape is None:
                raise InputError(f"{self.folder}: tensor '{name}' is no tensor of this model")
            if shape != tensor.shape:
                raise InputError(
                    f"{self.folder}: tensor '{name}': expected {list(shape)}, found "
                    f"{list(tensor.shape)}"
                )

    def verify(self, seen: Callable[[int], None] = lambda _bytes: None) -> None:
        """Compare every file with its checksum; `seen` hears how many bytes were read."""
        for name, file in self.manifest.files.items():
            digest = hashlib.sha256()
            with (self.folder / name).open("rb") as stream:
                while block := stream.read(_BLOCK_BYTES):
                    digest.update(block)
                    seen(len(block))
            if digest.hexdigest() != file.sha256:
                raise InputError(
                    f"{self.folder / name}: its bytes changed: expected sha256 {file.sha256}, "
                    f"found {digest.hexdigest()}; copy it again"
                )

    @property
    def stored(self) -> Mapping[str, StoredFile]:
        """The Hugging Face files that the weights came in."""
        return {
            name: StoredFile(tensors=file.tensors, metadata=file.metadata)
            for name, file in self.manifest.huggingface.items()
        }

    @property
    def carried(self) -> Mapping[str, Dtype]:
        """Stored tensors that the model does not need."""
        return {key: BY_NAME[tensor.dtype] for key, tensor in self.manifest.carried.items()}

    def carried_raw(self, key: str) -> Raw:
        """Return the bytes of a carried tensor."""
        tensor = self.manifest.carried[key]
        return self._array(tensor.file, key, tensor, tensor.shape)

    def dtype(self, name: str) -> Dtype:
        """Return the number format of a tensor."""
        return BY_NAME[self.manifest.tensors[self.owner(name)].dtype]

    def raw(self, name: str, bounds: Bounds) -> Raw:
        """Return the bytes of a slice, from as many parts as it meets."""
        name = self.owner(name)
        tensor = self.manifest.tensors[name]
        if not tensor.parts:
            whole = self._array(tensor.file, name, tensor, tensor.shape)
            return whole[tuple(slice(a, b) for a, b in bounds)].copy()
        out = np.empty([b - a for a, b in bounds], self.dtype(name).raw)
        (first, last), dim = bounds[tensor.dim], tensor.dim
        for part in tensor.parts:
            low, high = max(first, part.start), min(last, part.stop)
            if low >= high:
                continue
            shape = _with(tensor.shape, dim, part.stop - part.start)
            key = part_key(name, part.start, part.stop)
            source = [slice(a, b) for a, b in bounds]
            target = [slice(None)] * len(bounds)
            source[dim] = slice(low - part.start, high - part.start)
            target[dim] = slice(low - first, high - first)
            out[tuple(target)] = self._array(part.file, key, tensor, shape)[tuple(source)]
        return out

    def _array(self, file: str, key: str, tensor: Tensor, shape: tuple[int, ...]) -> Raw:
        if file not in self._opened:
            self._opened[file] = TensorFile(self.folder / file)
        opened = self._opened[file]
        entry = opened.entries.get(key)
        if entry is None:
            raise InputError(f"{opened.path}: tensor '{key}' is missing; expected {list(shape)}")
        if entry.shape != shape or entry.dtype.name != tensor.dtype:
            raise InputError(
                f"{opened.path}: tensor '{key}': expected {tensor.dtype} {list(shape)}, found "
                f"{entry.dtype.name} {list(entry.shape)}"
            )
        return opened.array(key)

    def drop(self) -> None:
        """Give back the pages of all files."""
        for file in self._opened.values():
            file.drop()

    def plain_files(self) -> tuple[str, ...]:
        """Return the files beside the weights."""
        return tuple(n for n in self.manifest.files if not n.endswith(".safetensors"))

    def identity(self) -> object:
        """Return the checksums of all files."""
        return {name: file.sha256 for name, file in self.manifest.files.items()}


def _with(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])
