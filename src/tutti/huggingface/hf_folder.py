"""A Hugging Face folder as a `Checkpoint`: through its weight map, checked against its model.

Every tensor that the model needs must be there in its shape, and every tensor that is there must
be one that the model needs or that its map names as carried.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from tutti import files
from tutti.errors import InputError
from tutti.huggingface.checkpoint import Checkpoint, StoredFile
from tutti.huggingface.dtypes import Dtype
from tutti.huggingface.maps import key_table
from tutti.huggingface.pieces import Bounds, gather, whole
from tutti.huggingface.side_files import plain_paths
from tutti.huggingface.tensor_file import Entry, Raw, TensorFile
from tutti.huggingface.weight_map import KeyTable
from tutti.models import load_model

INDEX = "model.safetensors.index.json"
_WEIGHTS = (
    ".safetensors",
    ".bin",
    ".pth",
    ".pt",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".onnx_data",
)
_ROWS = 1024  # of an embedding, compared at a time
_WEIGHT_INDEXES = (".bin.index.json", ".h5.index.json")


class HfFolder(Checkpoint):
    """The weights in a Hugging Face folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._begin(_config(folder))
        super().__init__(folder, load_model(f"{folder}/"))
        self._files = {name: TensorFile(folder / name) for name in _weight_files(folder)}
        self._entries = self._seen(_entries(folder, self._files))
        self.table: KeyTable = key_table(self.spec, self._entries.keys())
        self._dtypes = _checked(folder, self.table, self._entries)
        self._carried = {
            key: entry.dtype
            for key, (_, entry) in self._entries.items()
            if key not in self.table.stored
        }

    def _begin(self, config: dict[str, object]) -> None:
        """Refuse what this kind of folder cannot read."""
        if config.get("quantization_config"):
            raise InputError(
                f"{self.folder / 'config.json'}: 'quantization_config' is set: the weights are "
                "quantised; tutti serves them, and converts and trains plain ones (load it with "
                "transformers, dequantize, and save it again)"
            )

    def _seen(
        self, entries: dict[str, tuple[TensorFile, Entry]]
    ) -> dict[str, tuple[TensorFile, Entry]]:
        """Return the tensors as the model sees them."""
        return entries

    @property
    def stored(self) -> Mapping[str, StoredFile]:
        """The files, as they are."""
        return {
            name: StoredFile(tensors=tuple(file.entries), metadata=file.metadata)
            for name, file in self._files.items()
        }

    @property
    def carried(self) -> Mapping[str, Dtype]:
        """The tensors that the map names as carried."""
        return self._carried

    def carried_raw(self, key: str) -> Raw:
        """Return the bytes of a carried tensor."""
        return self._array(key)

    def dtype(self, name: str) -> Dtype:
        """Return the number format of a tensor."""
        return self._dtypes[self.owner(name)]

    def raw(self, name: str, bounds: Bounds) -> Raw:
        """Return the bytes of a slice."""
        located = self.table.tensors[self.owner(name)]
        return gather(located.pieces, located.shape, bounds, self.dtype(name), self._array)

    def check_tied(self) -> None:
        """Refuse a stored head that is not the embedding which config.json ties it to."""
        for name, located in self.table.tensors.items():
            tied_to = located.parameter.tied_to
            if tied_to is None or located.pieces[0].key not in self._entries:
                continue
            rows, *rest = located.shape
            for start in range(0, rows, _ROWS):
                bounds = ((start, min(rows, start + _ROWS)), *whole(rest))
                stored = gather(
                    located.pieces, located.shape, bounds, self._dtypes[name], self._array
                )
                if self._dtypes[name] != self.dtype(tied_to) or not np.array_equal(
                    stored, self.raw(tied_to, bounds)
                ):
                    other = self.table.tensors[tied_to].pieces[0].key
                    raise InputError(
                        f"{self.folder}: tensor '{located.pieces[0].key}' differs from '{other}', "
                        "to which config.json ties it; set 'tie_word_embeddings' to false there "
                        "if the head is its own"
                    )
                self.drop()

    def drop(self) -> None:
        """Give back the pages of all files."""
        for file in self._files.values():
            file.drop()

    def plain_files(self) -> tuple[str, ...]:
        """Return everything that is no weights, below the folder too."""
        paths = (path for path in plain_paths(self.folder) if not is_weights(path.name))
        return tuple(path.relative_to(self.folder).as_posix() for path in paths)

    def identity(self) -> object:
        """Return each file's size, time and header."""
        return {
            name: [
                file.num_bytes,
                file.path.stat().st_mtime_ns,
                hashlib.sha256(file.header).hexdigest(),
            ]
            for name, file in self._files.items()
        }

    def _array(self, key: str) -> Raw:
        file, _ = self._entries[key]
        return file.array(key)


def is_weights(name: str) -> bool:
    """Tell whether a file holds weights in some format, by its name."""
    return name.endswith(_WEIGHTS) or name.endswith(_WEIGHT_INDEXES)


def _config(folder: Path) -> dict[str, object]:
    path = folder / "config.json"
    files.require_folder(folder)
    if not path.is_file():
        raise InputError(f"{folder}: the folder holds no config.json; is it a model's?")
    value = files.parse_json(files.read_text(path), str(path))
    if not isinstance(value, dict):
        raise InputError(f"{path}: not a model's config.json: expected a mapping at the top")
    return value


def _weight_files(folder: Path) -> list[str]:
    index = folder / INDEX
    if index.is_file():
        value = files.parse_json(files.read_text(index), str(index))
        mapped = value.get("weight_map") if isinstance(value, dict) else None
        if not isinstance(mapped, dict) or not all(isinstance(v, str) for v in mapped.values()):
            raise InputError(f"{index}: 'weight_map' is missing or no mapping of tensors to files")
        names = sorted(set(mapped.values()))
        for name in names:
            if Path(name).name != name:
                raise InputError(f"{index}: names '{name}', which is no file of this folder")
            if not (folder / name).is_file():
                key = next(key for key, file in mapped.items() if file == name)
                raise InputError(
                    f"{index}: tensor '{key}' is said to be in '{name}', which is not in the "
                    "folder; download it again"
                )
        return names
    weights = sorted(path.name for path in folder.glob("*.safetensors"))
    if "model.safetensors" in weights:
        return ["model.safetensors"]
    if not weights:
        others = sorted(path.name for path in folder.iterdir() if is_weights(path.name))
        has = f"; it has {others[0]}: save it with transformers' save_pretrained" if others else ""
        raise InputError(f"{folder}: the folder holds no .safetensors file{has}")
    return weights


def _entries(folder: Path, opened: Mapping[str, TensorFile]) -> dict[str, tuple[TensorFile, Entry]]:
    entries: dict[str, tuple[TensorFile, Entry]] = {}
    for name, file in opened.items():
        for key, entry in file.entries.items():
            if key in entries:
                raise InputError(
                    f"{folder}: tensor '{key}' is in both '{entries[key][0].path.name}' "
                    f"and '{name}'"
                )
            entries[key] = (file, entry)
    return entries


def _checked(
    folder: Path, table: KeyTable, entries: Mapping[str, tuple[TensorFile, Entry]]
) -> dict[str, Dtype]:
    """Check keys, shapes and formats against the model; return each tensor's format."""
    missing = [key for key in _needed(table) if key not in entries]
    if missing:
        expected = table.stored[missing[0]][0][1].shape
        more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputError(
            f"{folder}: tensor '{missing[0]}' is missing; expected {list(expected)}{more}"
        )
    extra = [key for key in entries if key not in table.stored and not table.is_carried(key)]
    if extra:
        entry = entries[extra[0]][1]
        more = f", and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise InputError(
            f"{folder}: tensor '{extra[0]}' {list(entry.shape)} is no tensor of this model; "
            f"expected none of that name{more}"
        )
    for key, parts in table.stored.items():
        if key in entries and entries[key][1].shape != parts[0][1].shape:
            raise InputError(
                f"{folder}: tensor '{key}': expected {list(parts[0][1].shape)}, found "
                f"{list(entries[key][1].shape)}"
            )
    return dict(_formats(folder, table, entries))


def _needed(table: KeyTable) -> Iterator[str]:
    for located in table.tensors.values():
        if located.parameter.tied_to is None:
            yield from (piece.key for piece in located.pieces)


def _formats(
    folder: Path, table: KeyTable, entries: Mapping[str, tuple[TensorFile, Entry]]
) -> Iterator[tuple[str, Dtype]]:
    for name, located in table.tensors.items():
        dtypes = {p.key: entries[p.key][1].dtype for p in located.pieces if p.key in entries}
        if not dtypes:  # a tied head that is not stored
            continue
        first_key, first = next(iter(dtypes.items()))
        for key, dtype in dtypes.items():
            if dtype != first:
                raise InputError(
                    f"{folder}: tensor '{key}' is {dtype.code}, '{first_key}' {first.code}; they "
                    f"are parts of '{name}', which has one format"
                )
        yield name, first


def is_quantised(folder: Path) -> bool:
    """Tell whether a folder's config.json says that its weights are quantised."""
    return bool(_config(folder).get("quantization_config"))
