"""What a conversion writes: files as lists of tensors, each of which yields its bytes in blocks.

Nothing here holds a whole tensor unless it must be put together from several (a fused one on the
way back to Hugging Face); everything else passes through in blocks of `BLOCK_BYTES`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tutti.huggingface.checkpoint import Checkpoint, StoredFile
from tutti.huggingface.dtypes import Dtype
from tutti.huggingface.layout import Placed
from tutti.huggingface.manifest import part_key
from tutti.huggingface.pieces import Bounds, Piece, scatter, whole
from tutti.huggingface.tensor_file import Entry, Raw, header_bytes
from tutti.huggingface.weight_map import KeyTable

BLOCK_BYTES = 16 << 20
MOST_STORED_BYTES = 5_000_000_000  # of one Hugging Face file, where the checkpoint sets none


class Content(Protocol):
    """Where the bytes of a written tensor come from."""

    def blocks(self, source: Checkpoint) -> Iterator[tuple[Raw, Dtype]]:
        """Yield the bytes from first to last, in the source's number format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A slice of one of our tensors."""

    name: str
    bounds: Bounds

    def blocks(self, source: Checkpoint) -> Iterator[tuple[Raw, Dtype]]:
        """Yield runs of rows."""
        dtype = source.dtype(self.name)
        if not self.bounds:
            yield source.raw(self.name, ()), dtype
            return
        (first, last), rest = self.bounds[0], self.bounds[1:]
        row_bytes = math.prod(b - a for a, b in rest) * dtype.num_bytes
        step = max(1, BLOCK_BYTES // max(1, row_bytes))
        for start in range(first, last, step):
            yield source.raw(self.name, ((start, min(start + step, last)), *rest)), dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A tensor as Hugging Face stores it, put together from ours."""

    parts: tuple[tuple[str, Piece], ...]

    def blocks(self, source: Checkpoint) -> Iterator[tuple[Raw, Dtype]]:
        """Yield it in runs of rows if it is one of ours as it is, else as a whole."""
        (name, piece), *others = self.parts
        if not others and piece.plain:
            rest = whole(source.parameter(name).shape[1:])
            bounds = ((piece.start, piece.stop), *rest)
            yield from Slice(name=name, bounds=bounds).blocks(source)
            return

        def rows(name: str, start: int, stop: int) -> Raw:
            return source.raw(name, ((start, stop), *whole(source.parameter(name).shape[1:])))

        dtype = source.dtype(name)
        yield scatter(self.parts, dtype, rows), dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """A stored tensor that the model does not need, as it is."""

    key: str

    def blocks(self, source: Checkpoint) -> Iterator[tuple[Raw, Dtype]]:
        """Yield it as a whole."""
        yield source.carried_raw(self.key), source.carried[self.key]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputTensor:
    """One tensor of a written file."""

    key: str
    dtype: Dtype
    shape: tuple[int, ...]
    content: Content

    @property
    def num_bytes(self) -> int:
        """Its size in the file."""
        return math.prod(self.shape) * self.dtype.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFile:
    """One safetensors file to be written."""

    name: str
    tensors: tuple[OutputTensor, ...]
    metadata: Mapping[str, str]

    def header(self) -> bytes:
        """Return the bytes before the first tensor."""
        entries: dict[str, Entry] = {}
        at = 0
        for t in self.tensors:
            stop = at + t.num_bytes
            entries[t.key] = Entry(key=t.key, dtype=t.dtype, shape=t.shape, start=at, stop=stop)
            at = stop
        return header_bytes(entries, self.metadata)

    @property
    def num_bytes(self) -> int:
        """The size of the file."""
        return len(self.header()) + sum(tensor.num_bytes for tensor in self.tensors)


def output_file(
    name: str, tensors: Sequence[OutputTensor], metadata: Mapping[str, str] | None = None
) -> OutputFile:
    """Return a file whose wider numbers come first, so that all are aligned."""
    ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.num_bytes)
    return OutputFile(name=name, tensors=tuple(ordered), metadata=metadata or {})


class Formats:
    """The number format that each tensor is written in: its own, or the one asked for.

    Buffers keep theirs (transformers holds a router's correction in fp32 on purpose), and so do
    carried tensors.
    """

    def __init__(self, source: Checkpoint, wanted: Dtype | None) -> None:
        self._source, self.wanted = source, wanted

    def of(self, name: str) -> Dtype:
        """Return the format of one of our tensors."""
        stored = self._source.dtype(name)
        if self.wanted is None or not stored.floating or not self._source.parameter(name).trainable:
            return stored
        return self.wanted


def tutti_files(layout: Mapping[str, Sequence[Placed]], formats: Formats) -> Iterator[OutputFile]:
    """Yield the files of a tutti folder."""
    for file, placed in layout.items():
        tensors = []
        for item in placed:
            bounds = [(0, size) for size in item.shape]
            if item.part:
                bounds[item.dim] = (item.start, item.stop)
            key = part_key(item.name, item.start, item.stop) if item.part else item.name
            tensors.append(
                OutputTensor(
                    key=key,
                    dtype=formats.of(item.name),
                    shape=item.shape,
                    content=Slice(name=item.name, bounds=tuple(bounds)),
                )
            )
        yield output_file(file, tensors)


def carried_file(name: str, source: Checkpoint) -> OutputFile:
    """Return the file of the carried tensors."""
    return output_file(name, [_carried(key, source) for key in source.carried])


def _carried(key: str, source: Checkpoint) -> OutputTensor:
    shape = source.carried_raw(key).shape
    return OutputTensor(key=key, dtype=source.carried[key], shape=shape, content=Carried(key=key))


def stored_files(source: Checkpoint, table: KeyTable, formats: Formats) -> Iterator[OutputFile]:
    """Yield the Hugging Face files: those that the weights came in, or new ones."""
    for file, stored in (source.stored or new_files(table, formats)).items():
        tensors = []
        for key in stored.tensors:
            if key not in table.stored:
                tensors.append(_carried(key, source))
                continue
            parts = table.stored[key]
            tensors.append(
                OutputTensor(
                    key=key,
                    dtype=formats.of(parts[0][0]),
                    shape=parts[0][1].shape,
                    content=Stored(parts=parts),
                )
            )
        if formats.wanted is None and source.stored:  # exactly as it was
            yield OutputFile(name=file, tensors=tuple(tensors), metadata=stored.metadata)
        else:
            yield output_file(file, tensors, stored.metadata)


def new_files(table: KeyTable, formats: Formats) -> dict[str, StoredFile]:
    """Return files for weights that never were in any; a tied head is left out."""
    keys = [
        key
        for key, parts in table.stored.items()
        if any(table.tensors[name].parameter.tied_to is None for name, _ in parts)
    ]
    runs: list[list[str]] = [[]]
    size = 0
    for key in keys:
        name, piece = table.stored[key][0]
        num_bytes = math.prod(piece.shape) * formats.of(name).num_bytes
        if runs[-1] and size + num_bytes > MOST_STORED_BYTES:
            runs.append([])
            size = 0
        runs[-1].append(key)
        size += num_bytes
    if len(runs) == 1:
        names = ["model.safetensors"]
    else:
        names = [f"model-{n + 1:05}-of-{len(runs):05}.safetensors" for n in range(len(runs))]
    return {
        name: StoredFile(tensors=tuple(run), metadata={"format": "pt"})
        for name, run in zip(names, runs, strict=True)
    }


def index_text(files: Sequence[OutputFile]) -> str:
    """Return the index of several Hugging Face files, as transformers writes it."""
    mapped = {tensor.key: file.name for file in files for tensor in file.tensors}
    total = sum(tensor.num_bytes for file in files for tensor in file.tensors)
    value = {"metadata": {"total_size": total}, "weight_map": dict(sorted(mapped.items()))}
    return json.dumps(value, indent=2) + "\n"
