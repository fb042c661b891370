"""A checkpoint that is another one with something changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tutti import files
from tutti.errors import InputError
from tutti.huggingface.checkpoint import Checkpoint, StoredFile
from tutti.huggingface.dtypes import Dtype
from tutti.huggingface.pieces import Bounds
from tutti.huggingface.tensor_file import Raw
from tutti.models import ModelSpec


class Changed(Checkpoint):
    """What is not changed is the inner checkpoint's."""

    def __init__(self, inner: Checkpoint, spec: ModelSpec) -> None:
        super().__init__(inner.folder, spec)
        self.inner = inner

    def dtype(self, name: str) -> Dtype:
        """Return the number format of a tensor."""
        return self.inner.dtype(name)

    def raw(self, name: str, bounds: Bounds) -> Raw:
        """Return the bytes of a slice."""
        return self.inner.raw(name, bounds)

    def drop(self) -> None:
        """Give back the memory of files that were looked at."""
        self.inner.drop()

    @property
    def stored(self) -> Mapping[str, StoredFile]:
        """The files that the weights came in."""
        return self.inner.stored

    @property
    def carried(self) -> Mapping[str, Dtype]:
        """Stored tensors that the model does not need."""
        return self.inner.carried

    def carried_raw(self, key: str) -> Raw:
        """Return the bytes of a carried tensor."""
        return self.inner.carried_raw(key)

    def plain_files(self) -> tuple[str, ...]:
        """Return the files beside the weights."""
        return self.inner.plain_files()

    def identity(self) -> object:
        """Return plain values that change when the stored weights do."""
        return self.inner.identity()


def config_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return a folder's config.json."""
    path = checkpoint.folder / "config.json"
    value = files.parse_json(files.read_text(path), str(path))
    if not isinstance(value, dict):
        raise InputError(f"{path}: not a model's config.json: expected a mapping at the top")
    return value
