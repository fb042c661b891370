"""Reads safetensors files: a JSON header, then bytes, which are mapped into memory and not read.

The header is checked against the file before anything is used: a file that was cut short or whose
header is damaged is one line that says so. `drop` gives mapped pages back, so that walking through
a file of any size holds no more of it than is being looked at.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from tutti.document import shown
from tutti.errors import InputError
from tutti.huggingface.dtypes import BY_CODE, Dtype

Raw = NDArray[np.unsignedinteger[Any]]
MOST_HEADER_BYTES = 100_000_000  # what the format allows
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Where one tensor lies in a file; the offsets count from the end of the header."""

    key: str
    dtype: Dtype
    shape: tuple[int, ...]
    start: int
    stop: int


class TensorFile:
    """One safetensors file, open for reading."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as stream:
                self.num_bytes = path.stat().st_size
                self.header = _read_header(stream.read(8), stream, path, self.num_bytes)
                self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror})") from None
        self._data_start = 8 + len(self.header)
        self._looked_at = False
        self.metadata, self.entries = _parse_header(
            self.header, path, self.num_bytes - self._data_start
        )

    def array(self, key: str) -> Raw:
        """Return a tensor's bytes as an array of its shape, without reading them."""
        entry = self.entries[key]
        count = math.prod(entry.shape)
        offset = self._data_start + entry.start
        if count == 0:
            return np.empty(entry.shape, entry.dtype.raw)
        self._looked_at = True
        flat = np.frombuffer(self._map, entry.dtype.raw, count, offset)
        return flat.reshape(entry.shape)

    def drop(self) -> None:
        """Give the pages that were looked at back to the system."""
        if self._looked_at:
            self._map.madvise(mmap.MADV_DONTNEED)
            self._looked_at = False


def _read_header(length_bytes: bytes, stream: Any, path: Path, num_bytes: int) -> bytes:
    if len(length_bytes) < 8:
        raise InputError(
            f"{path}: is cut short: {num_bytes} bytes; a safetensors file has at least 8"
        )
    (length,) = _LENGTH.unpack(length_bytes)
    if length > MOST_HEADER_BYTES:
        raise InputError(
            f"{path}: no safetensors file, or its header is damaged: it claims to be {length} bytes"
        )
    header: bytes = stream.read(length)
    if len(header) < length:
        raise InputError(
            f"{path}: is cut short: its header needs {length} bytes, the file has {len(header)} "
            "after its first 8; copy it again"
        )
    return header


def _parse_header(
    header: bytes, path: Path, data_bytes: int
) -> tuple[dict[str, str], dict[str, Entry]]:
    try:
        values = json.loads(header.decode("utf-8"))
    except ValueError as error:
        raise InputError(f"{path}: its header is damaged ({error}); copy it again") from None
    if not isinstance(values, dict):
        raise InputError(f"{path}: its header is damaged: expected a mapping of tensors")
    metadata = values.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise InputError(f"{path}: its header is damaged: '__metadata__' is {shown(metadata)}")
    entries = sorted((_entry(key, value, path) for key, value in values.items()), key=_order)
    _check_offsets(entries, path, data_bytes)
    return metadata, {entry.key: entry for entry in entries}


def _order(entry: Entry) -> tuple[int, int]:
    return entry.start, entry.stop


def _entry(key: str, value: object, path: Path) -> Entry:
    damaged = InputError(f"{path}: tensor '{key}': its header entry is damaged: {shown(value)}")
    if not isinstance(value, dict):
        raise damaged
    code, shape, span = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(code, str) or code not in BY_CODE:
        raise InputError(
            f"{path}: tensor '{key}': 'dtype' is {shown(code)}; tutti moves whole-byte formats: "
            + ", ".join(BY_CODE)
        )
    if not _naturals(shape) or not _naturals(span) or len(span) != 2:
        raise damaged
    dtype, sizes = BY_CODE[code], tuple(shape)
    needed, given = math.prod(sizes) * dtype.num_bytes, span[1] - span[0]
    if needed != given:
        raise InputError(
            f"{path}: tensor '{key}': {code} {list(sizes)} needs {needed} bytes, its header gives "
            f"it {given}"
        )
    return Entry(key=key, dtype=dtype, shape=sizes, start=span[0], stop=span[1])


def _naturals(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_offsets(entries: list[Entry], path: Path, data_bytes: int) -> None:
    at = 0
    for entry in entries:
        if entry.start != at:
            raise InputError(
                f"{path}: tensor '{entry.key}': starts at byte {entry.start}; the one before it "
                f"ends at {at}: its header is damaged"
            )
        at = entry.stop
        if at > data_bytes:
            raise InputError(
                f"{path}: is cut short: tensor '{entry.key}' ends at byte {at} of the data, the "
                f"file has {data_bytes}; copy it again"
            )
    if at != data_bytes:
        raise InputError(
            f"{path}: its header describes {at} bytes of data, the file has {data_bytes}"
        )


def header_bytes(entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> bytes:
    """Return the header of a file with these tensors, padded as the format asks."""
    values: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    for entry in entries.values():
        values[entry.key] = {
            "dtype": entry.dtype.code,
            "shape": list(entry.shape),
            "data_offsets": [entry.start, entry.stop],
        }
    text = json.dumps(values, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return _LENGTH.pack(len(text)) + text
