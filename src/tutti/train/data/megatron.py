"""Megatron's `.bin` and `.idx`: tokenised documents, read where they lie.

The index is, little-endian: nine bytes of magic, version (uint64, 1), a code for the dtype (uint8),
the number of sequences and of document boundaries (uint64 each), the length of every sequence
(int32), its byte in the `.bin` (int64), and the boundaries as numbers of sequences (int64). A byte
per sequence may follow (the mode, of multimodal data), which is not read.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from tutti.errors import InputError
from tutti.train.data.store import TokenStore

MAGIC = b"MMIDIDX\x00\x00"
_HEADER_BYTES = len(MAGIC) + 8 + 1 + 8 + 8
DTYPES: dict[int, str] = {
    1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2",
}  # fmt: skip


def open_megatron(stem: Path, name: str) -> TokenStore:
    """Open `stem`.bin with the help of `stem`.idx."""
    index, data = Path(f"{stem}.idx"), Path(f"{stem}.bin")
    for file in (index, data):
        if not file.is_file():
            raise InputError(f"{file}: no such file; a .bin and an .idx belong together")
    try:
        raw = np.memmap(index, np.uint8, "r") if index.stat().st_size else np.zeros(0, np.uint8)
        size = data.stat().st_size
    except OSError as error:
        raise InputError(f"{error.filename}: cannot be read ({error.strerror})") from None
    head = raw[:_HEADER_BYTES].tobytes()
    if len(head) < _HEADER_BYTES or not head.startswith(MAGIC):
        raise InputError(f"{index}: not an index of Megatron's indexed dataset")
    version, code = int.from_bytes(head[9:17], "little"), head[17]
    sequences, boundaries = (int.from_bytes(head[i : i + 8], "little") for i in (18, 26))
    if version != 1:
        raise InputError(f"{index}: version {version}; only version 1 can be read")
    dtype = np.dtype(DTYPES.get(code, "V"))
    if dtype.kind not in "iu":
        held = f"{dtype.name} numbers" if dtype.kind == "f" else f"an unknown dtype ({code})"
        raise InputError(f"{index}: holds {held}, not tokens")
    lengths_at = _HEADER_BYTES
    starts_at = lengths_at + 4 * sequences
    documents_at = starts_at + 8 * sequences
    if documents_at + 8 * boundaries > len(raw):
        raise InputError(f"{index}: cut short: {len(raw)} bytes of {documents_at + 8 * boundaries}")
    lengths = raw[lengths_at:starts_at].view("<i4").astype(np.int64)
    starts = raw[starts_at:documents_at].view("<i8")
    documents = raw[documents_at : documents_at + 8 * boundaries].view("<i8")
    ends = np.concatenate([[0], np.cumsum(lengths)])
    if not np.array_equal(starts, ends[:-1] * dtype.itemsize):
        raise InputError(f"{index}: sequences do not follow each other in the .bin")
    if size < ends[-1] * dtype.itemsize:
        raise InputError(
            f"{data}: cut short: {size} bytes of {ends[-1] * dtype.itemsize} that the index names"
        )
    if not ends[-1]:
        raise InputError(f"{stem}: holds no tokens")
    if boundaries < 2 or documents[0] != 0 or documents[-1] != sequences:
        raise InputError(f"{index}: the documents do not cover all {sequences} sequences")
    offsets = ends[documents].astype(np.int64)
    if (np.diff(offsets) < 0).any():
        raise InputError(f"{index}: the boundaries of documents go backwards")
    digest = hashlib.blake2b(raw.tobytes() + str(size).encode(), digest_size=16).hexdigest()
    tokens = np.memmap(data, dtype, "r", shape=(int(ends[-1]),))
    return TokenStore(tokens, offsets, None, name=name, digest=digest, largest=None)
