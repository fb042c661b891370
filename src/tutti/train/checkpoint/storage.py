"""Pieces in the folder format of torch.distributed.checkpoint.

Each rank has one file of its own, and `.metadata` says which rectangle of which tensor lies where;
the stock reader takes such a folder as any other. Ranges that are no rectangles become several
chunks of a tensor. Nobody gathers anything: a rank writes what it keeps, and reads what it keeps
from whichever files hold it.
"""

from __future__ import annotations

import importlib
import io
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from tutti.errors import DamagedError, InputError, TuttiError
from tutti.ownership.rectangles import Rectangle, intersection
from tutti.train.checkpoint.archive import read_tensor, write_tensor
from tutti.train.checkpoint.contents import Piece
from tutti.train.checkpoint.manifest import RANK_FILE, SavedFile, read_checked
from tutti.train.checkpoint.places import CheckpointFiles
from tutti.train.checkpoint.sharing import ChunkRead, SharedReads

METADATA = ".metadata"


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A chunk that was written, as the metadata will tell of it."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    rectangle: Rectangle
    start: int  # in the file
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPart:
    """One rank's file."""

    file: str
    num_bytes: int
    chunks: tuple[Written, ...]

    def to_document(self) -> dict[str, Any]:
        """Return plain values, to be sent to another rank."""
        chunks = [
            {**asdict(chunk), "dtype": str(chunk.dtype).removeprefix("torch.")}
            for chunk in self.chunks
        ]
        return {**asdict(self), "chunks": chunks}

    @classmethod
    def from_document(cls, value: Mapping[str, Any]) -> StoredPart:
        """Read what `to_document` wrote."""
        chunks = []
        for chunk in value["chunks"]:
            box = Rectangle(*(tuple(chunk["rectangle"][name]) for name in ("offsets", "sizes")))
            dtype, shape = getattr(torch, chunk["dtype"]), tuple(chunk["shape"])
            chunks.append(Written(**{**chunk, "dtype": dtype, "shape": shape, "rectangle": box}))
        return cls(**{**value, "chunks": tuple(chunks)})


# --- writing -------------------------------------------------------------------------------


def write_part(folder: Path, rank: int, pieces: Sequence[Piece]) -> StoredPart:
    """Write a rank's pieces, whose memory may be anywhere; return when they are on the disk."""
    path = folder / f"__{rank}_0{RANK_FILE}"
    chunks = []
    with path.open("wb") as stream:
        for piece in pieces:
            start, length = write_tensor(stream, piece.memory.detach().cpu().contiguous())
            chunks.append(
                Written(
                    key=piece.key,
                    dtype=piece.memory.dtype,
                    shape=piece.shape,
                    rectangle=piece.rectangle,
                    start=start,
                    length=length,
                )
            )
        stream.flush()
        os.fsync(stream.fileno())
        size = stream.tell()
    return StoredPart(file=path.name, num_bytes=size, chunks=tuple(chunks))


def prepare_format() -> None:
    """Import what `write_metadata` needs; that takes a second, of the one rank that calls it."""
    importlib.import_module("torch.distributed.checkpoint.filesystem")


def write_metadata(folder: Path, parts: Sequence[StoredPart], expected: Mapping[str, int]) -> None:
    """Write what all ranks wrote, after checking that it is all there is, each number once."""
    from torch.distributed.checkpoint import filesystem, metadata
    from torch.distributed.checkpoint.storage import WriteResult

    _check_complete(parts, expected)
    tensors: dict[str, metadata.STORAGE_TYPES] = {}
    results: list[list[WriteResult]] = []
    for part in parts:
        results.append([])
        for chunk in part.chunks:
            offsets, sizes = torch.Size(chunk.rectangle.offsets), torch.Size(chunk.rectangle.sizes)
            whole = metadata.TensorStorageMetadata(
                metadata.TensorProperties(dtype=chunk.dtype), torch.Size(chunk.shape), []
            )
            known = tensors.setdefault(chunk.key, whole)
            assert isinstance(known, metadata.TensorStorageMetadata)
            known.chunks.append(metadata.ChunkStorageMetadata(offsets, sizes))
            place = filesystem._StorageInfo(part.file, chunk.start, chunk.length)
            index = metadata.MetadataIndex(chunk.key, offsets)
            results[-1].append(WriteResult(index, chunk.length, place))
    writer = filesystem.FileSystemWriter(folder, sync_files=True)
    writer.finish(metadata.Metadata(tensors), results)


def _check_complete(parts: Sequence[StoredPart], expected: Mapping[str, int]) -> None:
    """Refuse to call something a checkpoint that lacks numbers; the fault is tutti's then."""
    counts = dict.fromkeys(expected, 0)
    for part in parts:
        for chunk in part.chunks:
            counts[chunk.key] = counts.get(chunk.key, 0) + chunk.rectangle.count
    for key, count in counts.items():
        if count != expected.get(key, 0):
            raise TuttiError(
                f"checkpoint: '{key}' has {expected.get(key, 0)} numbers, of which {count} were "
                "written: a fault of tutti, please report it with the plan"
            )


# --- reading -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Chunk:
    """A rectangle of a tensor in a file."""

    rectangle: Rectangle
    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class _Values:
    """An object of torch's metadata, as the plain values that it was pickled with."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.args = tuple(state)


class _MetadataReader(pickle.Unpickler):
    """Reads torch's metadata as plain values: a file that was tampered with can run nothing.

    Nor is torch.distributed.checkpoint imported, which takes a second.
    """

    def find_class(self, module: str, name: str) -> Any:
        """Return a class for what torch's metadata consists of, and refuse everything else."""
        if module.startswith("torch.distributed.checkpoint"):
            return _Values
        if module == "pathlib" and name in ("PosixPath", "PurePosixPath"):
            return Path
        if module == "torch":
            named = getattr(torch, name)
            if named is torch.Size or isinstance(named, torch.dtype):
                return named
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _Values
        raise pickle.UnpicklingError(f"holds a {module}.{name}")


def read_metadata(folder: Path, files: Mapping[str, SavedFile]) -> dict[str, Stored]:
    """Return what a folder holds, by key; `files` are those that its manifest names.

    The bytes are held against their checksum before anything is made of them.
    """
    return parse_metadata(str(folder), read_checked(folder, METADATA, files), files)


def parse_metadata(place: str, raw: bytes, files: Mapping[str, SavedFile]) -> dict[str, Stored]:
    """Return what the checkpoint at a place holds, by the bytes of its metadata."""
    stored = _parsed(f"{place}/{METADATA}", raw)
    for key, tensor in stored.items():
        for chunk in tensor.chunks:
            if chunk.file not in files or Path(chunk.file).name != chunk.file:
                raise InputError(
                    f"{place}/{METADATA}: '{key}' is said to be in '{chunk.file}', which is no "
                    "file of this checkpoint; it is not opened"
                )
    return stored


def _parsed(path: str, raw: bytes) -> dict[str, Stored]:
    try:
        metadata = _MetadataReader(io.BytesIO(raw)).load()
        places = {
            (index.fqn, tuple(index.offset)): place
            for index, place in metadata.storage_data.items()
        }
        return {
            key: _stored(key, tensor, places)
            for key, tensor in metadata.state_dict_metadata.items()
        }
    except (pickle.UnpicklingError, EOFError, AttributeError, KeyError, TypeError, ValueError):
        raise DamagedError(f"{path}: is damaged; load another checkpoint") from None


def _stored(key: str, tensor: Any, places: Mapping[tuple[str, tuple[int, ...]], Any]) -> Stored:
    chunks = []
    for chunk in tensor.chunks:
        rectangle = Rectangle(tuple(chunk.offsets), tuple(chunk.sizes))
        place = places[key, rectangle.offsets]
        chunks.append(Chunk(rectangle, place.relative_path, place.offset, place.length))
    dtype: torch.dtype = tensor.properties.args[0]
    return Stored(dtype, tuple(tensor.size), tuple(chunks))


Target = tuple[Rectangle, Tensor]  # of the whole tensor, and the memory of its sizes
_Reading = tuple[Chunk, Stored, list[Target]]  # a chunk, the tensor it is of, and what it fills


def read_into(
    folder: Path, stored: Mapping[str, Stored], wanted: Mapping[str, list[Target]]
) -> int:
    """Fill rectangles of tensors, by key; each chunk is read once. Return the bytes read."""
    by_file: dict[str, list[_Reading]] = {}
    for reading in _readings(str(folder), stored, wanted):
        by_file.setdefault(reading[0].file, []).append(reading)
    num_bytes = 0
    for file, reads in by_file.items():
        path = folder / file
        try:
            with path.open("rb") as stream:
                for chunk, tensor, targets in sorted(reads, key=lambda read: read[0].start):
                    num_bytes += chunk.length
                    _read_chunk(stream, path, chunk, tensor, targets)
        except OSError as error:
            raise DamagedError(f"{path}: cannot be read ({error.strerror})") from None
    return num_bytes


def read_shared(
    files: CheckpointFiles,
    shared: SharedReads,
    stored: Mapping[str, Stored],
    wanted: Mapping[str, list[Target]],
) -> None:
    """Fill rectangles as `read_into` does, from chunks that ranks hand to each other."""
    by_read: dict[ChunkRead, list[_Reading]] = {}
    for reading in _readings(files.place, stored, wanted):
        chunk = reading[0]
        read = ChunkRead(chunk.file, chunk.start, chunk.length)
        by_read.setdefault(read, []).append(reading)
    for read, memory in shared.chunks(files, list(by_read)):
        with io.BytesIO(memory) as stream:
            for chunk, tensor, targets in by_read[read]:
                at_start = replace(chunk, start=0)
                _read_chunk(stream, Path(files.place) / read.file, at_start, tensor, targets)


def _readings(
    place: str, stored: Mapping[str, Stored], wanted: Mapping[str, list[Target]]
) -> Iterator[_Reading]:
    """Yield every chunk that is needed, with what it fills."""
    for key, targets in wanted.items():
        tensor = stored[key]
        _check_covered(place, key, tensor, targets)
        for chunk in tensor.chunks:
            met = [target for target in targets if intersection(chunk.rectangle, target[0])]
            if met:
                yield chunk, tensor, met


def _read_chunk(
    stream: IO[bytes], path: Path, chunk: Chunk, tensor: Stored, targets: Iterable[Target]
) -> None:
    targets = list(targets)
    rectangle, memory = targets[0]
    whole = len(targets) == 1 and rectangle == chunk.rectangle and memory.device.type == "cpu"
    if whole and memory.dtype == tensor.dtype and memory.is_contiguous():
        read_tensor(stream, chunk.start, chunk.length, memory, path)
        return
    values = torch.empty(chunk.rectangle.sizes, dtype=tensor.dtype)
    read_tensor(stream, chunk.start, chunk.length, values, path)
    for rectangle, memory in targets:
        shared = intersection(chunk.rectangle, rectangle)
        assert shared is not None
        source = values[shared.within(chunk.rectangle).slices]
        memory[shared.within(rectangle).slices].copy_(source)


def _check_covered(place: str, key: str, tensor: Stored, targets: Iterable[Target]) -> None:
    for rectangle, _ in targets:
        shared = [intersection(chunk.rectangle, rectangle) for chunk in tensor.chunks]
        count = sum(part.count for part in shared if part is not None)
        if count != rectangle.count:
            raise InputError(
                f"{place}: of '{key}' {rectangle.count} numbers are needed at "
                f"{list(rectangle.offsets)}, the folder has {count}; load another checkpoint"
            )
