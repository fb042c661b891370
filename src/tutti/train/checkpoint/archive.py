"""One tensor in the file format of `torch.save`, without a copy on the way.

The format is a zip archive with the numbers as they lie in memory. torch's own writer copies them
into a Python object first and holds the interpreter while it does: a training loop beside it stands
still. Here the memory itself goes to the file, and the interpreter is free meanwhile. What is
written is read by `torch.load`; what is read was checked against its checksum.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from tutti.errors import DamagedError

_NUMBERS = "archive/data/0"
_LOCAL_HEADER_BYTES = 30  # before a file's name, in a zip archive


class _Storage:
    """Stands for a tensor's memory in the pickle."""

    def __init__(self, dtype: torch.dtype, count: int) -> None:
        kind = torch.storage._dtype_to_storage_type_map()[dtype]
        self.label = ("storage", getattr(torch, kind), "0", "cpu", count)


class _Shell:
    """Stands for a contiguous tensor in the pickle: everything but its numbers."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = _Storage(tensor.dtype, tensor.numel())
        self._sizes, self._strides = tuple(tensor.shape), tuple(tensor.stride())

    def __reduce__(self) -> tuple[Any, ...]:
        hooks: OrderedDict[str, Any] = OrderedDict()
        fields = (self._storage, 0, self._sizes, self._strides, False, hooks)
        return torch._utils._rebuild_tensor_v2, fields


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: object) -> object:
        return value.label if isinstance(value, _Storage) else None


class _Section(io.RawIOBase):
    """A file from one of its places on, as if it began there."""

    def __init__(self, stream: IO[bytes], start: int, length: int | None = None) -> None:
        super().__init__()
        self._stream, self._start, self._length = stream, start, length

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_END and self._length is not None:
            offset, whence = self._length + offset, io.SEEK_SET
        base = self._start if whence == io.SEEK_SET else 0
        return self._stream.seek(base + offset, whence) - self._start

    def tell(self) -> int:
        return self._stream.tell() - self._start

    def write(self, data: Any) -> int:
        return self._stream.write(data)

    def read(self, size: int = -1) -> bytes:
        if self._length is not None:
            left = self._length - self.tell()
            size = left if size < 0 else min(size, left)
        return self._stream.read(size)


def memory_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the host."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def write_tensor(stream: IO[bytes], tensor: Tensor) -> tuple[int, int]:
    """Append a contiguous tensor of the host to a file; return where it begins and its length."""
    start = stream.tell()
    shell = io.BytesIO()
    _Pickler(shell, protocol=2).dump(_Shell(tensor))
    with zipfile.ZipFile(_Section(stream, start), "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", shell.getvalue())
        archive.writestr("archive/byteorder", b"little")
        archive.writestr(_NUMBERS, memory_of(tensor))
        archive.writestr("archive/version", b"3\n")
    stream.seek(0, io.SEEK_END)
    return start, stream.tell() - start


def read_tensor(stream: IO[bytes], start: int, length: int, into: Tensor, path: Path) -> None:
    """Fill a contiguous tensor of the host with one that was written."""
    memory = memory_of(into)
    try:
        with zipfile.ZipFile(_Section(stream, start, length)) as archive:
            entry = archive.getinfo(_NUMBERS)
        checksum_bytes = _read_entry(stream, start, entry, memory)
    except _BROKEN:
        raise DamagedError(f"{path}: damaged at byte {start}; load another checkpoint") from None
    if entry.file_size != memory.nbytes:
        raise DamagedError(
            f"{path}: holds {entry.file_size} bytes at {start} where {memory.nbytes} are expected; "
            "load another checkpoint"
        )
    if checksum_bytes != memory.nbytes or zlib.crc32(memory) != entry.CRC:
        raise DamagedError(
            f"{path}: the numbers at byte {start} do not match their checksum; load another "
            "checkpoint"
        )


# what zipfile raises on bytes that are no archive, or on one whose places are outside of the file
_BROKEN = (
    zipfile.BadZipFile, KeyError, OSError, ValueError, OverflowError, NotImplementedError,
    EOFError, struct.error,
)  # fmt: skip


def _read_entry(stream: IO[bytes], start: int, entry: zipfile.ZipInfo, memory: memoryview) -> int:
    """Read an entry's bytes straight into memory; return how many came."""
    if entry.file_size != memory.nbytes:
        return 0
    stream.seek(start + entry.header_offset)
    header = stream.read(_LOCAL_HEADER_BYTES)
    name, extra = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    stream.seek(name + extra, io.SEEK_CUR)
    return int(stream.readinto(memory))  # type: ignore[attr-defined]
