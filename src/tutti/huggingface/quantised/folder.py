"""`QuantisedFolder`: a Hugging Face folder whose weights are quantised, as a `Checkpoint`.

Tensors that belong to one weight are seen as that weight, so that it is checked against the model
like any other. `quantised` gives its codes; `read` is for those that are plain.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from tutti.errors import InputError
from tutti.huggingface.dtypes import BY_NAME
from tutti.huggingface.hf_folder import HfFolder
from tutti.huggingface.pieces import Bounds, stored_rows
from tutti.huggingface.quantised.modules import Module, find_modules
from tutti.huggingface.quantised.scheme import Scheme, read_scheme
from tutti.huggingface.quantised.unpack import Packed, stored_shape, unpack
from tutti.huggingface.tensor_file import Entry, Raw, TensorFile
from tutti.huggingface.tensors import to_torch


class StoredRows(NamedTuple):
    """Rows of a stored weight that are rows of a logical one, or one of its experts."""

    packed: Packed
    rows: torch.Tensor | None  # None: all, in their order


class QuantisedFolder(HfFolder):
    """The weights in a folder with a `quantization_config`."""

    _scheme: Scheme
    _modules: dict[str, Module]
    _parts: Mapping[str, tuple[TensorFile, Entry]]

    def __init__(self, folder: Path) -> None:
        self._last: tuple[str, Packed] | None = None
        super().__init__(folder)

    @property
    def method(self) -> str:
        """What quantised the weights."""
        return self._scheme.method

    def _begin(self, config: dict[str, object]) -> None:
        place = str(self.folder / "config.json")
        self._scheme = read_scheme(config.get("quantization_config"), place)

    def _seen(
        self, entries: dict[str, tuple[TensorFile, Entry]]
    ) -> dict[str, tuple[TensorFile, Entry]]:
        """Return the entries with one for each quantised weight instead of its tensors."""
        self._parts = entries
        try:
            self._modules, used = find_modules(
                self._scheme, {key: entry for key, (_, entry) in entries.items()}
            )
            shapes = {
                key: stored_shape(self._scheme, module, self._tensor)
                for key, module in self._modules.items()
            }
        except InputError as error:
            raise InputError(f"{self.folder}: {error}") from None
        if not self._modules:
            raise InputError(
                f"{self.folder}: 'quantization_config' says {self._scheme.method}, and no tensor "
                "is quantised; take it out of config.json if the weights are plain"
            )
        seen = {key: entry for key, entry in entries.items() if key not in used}
        for key, module in self._modules.items():
            first = entries[module.first]
            whole = Entry(key=key, dtype=BY_NAME["float32"], shape=shapes[key], start=0, stop=0)
            seen[key] = (first[0], whole)
        return seen

    def quantised(self, name: str) -> tuple[StoredRows, ...] | None:
        """Return the stored weights that a tensor is made of; None: it is plain.

        Of a layer's experts, one after the other; else parts stand one below the other.
        """
        located = self.table.tensors[self.owner(name)]
        if located.pieces[0].key not in self._modules:
            return None
        stored = []
        for piece in located.pieces:
            rows = stored_rows(piece)
            if piece.order or rows is None:
                raise InputError(
                    f"{self.folder}: '{piece.key}' is stored transposed; tutti reads quantised "
                    "weights of (out, in)"
                )
            whole = len(rows) == piece.shape[0] and bool((rows[1:] > rows[:-1]).all())
            stored.append(
                StoredRows(self._packed(piece.key), None if whole else torch.from_numpy(rows))
            )
        return tuple(stored)

    def raw(self, name: str, bounds: Bounds) -> Raw:
        """Return the bytes of a slice of a plain tensor."""
        key = self.table.tensors[self.owner(name)].pieces[0].key
        if key in self._modules:
            raise InputError(f"{self.folder}: '{key}' is quantised; it has no plain numbers")
        return super().raw(name, bounds)

    def _packed(self, key: str) -> Packed:
        """Return a stored weight; the last one is kept, for several tensors may be in it."""
        if self._last is None or self._last[0] != key:
            try:
                self._last = (key, unpack(self._scheme, self._modules[key], self._tensor))
            except InputError as error:
                raise InputError(f"{self.folder}: {error}") from None
        return self._last[1]

    def _tensor(self, entry: Entry) -> torch.Tensor:
        file, _ = self._parts[entry.key]
        return to_torch(file.array(entry.key).copy(), entry.dtype)
