"""Rows of a store: 32-bit numbers, block by block, so that one figure costs one block to read.

The last bits are cut (four digits stay), what follows is taken as the difference to what went
before, and the bytes are laid out by their weight and compressed.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from tutti.errors import DamagedError

CHUNK = 60  # values of a row
_KEPT_BITS = 0xFFFFF000  # 11 bits of mantissa
_BLOCK = 16  # figures that are packed together
Floats = npt.NDArray[np.float32]


def packed(values: Floats) -> bytes:
    """Return a row's numbers, packed block by block, so that one figure costs one block."""
    rows = np.ascontiguousarray(values, np.float32).reshape(len(values), -1)
    blocks = [_block(rows[at : at + _BLOCK]) for at in range(0, len(rows), _BLOCK)]
    sizes = np.array([len(blocks), *(len(block) for block in blocks)], "<u4")
    return sizes.tobytes() + b"".join(blocks)


def _block(rows: Floats) -> bytes:
    bits = (rows.view(np.uint32) & np.uint32(_KEPT_BITS)).reshape(-1, CHUNK)
    bits[:, 1:] ^= bits[:, :-1].copy()
    return zlib.compress(bits.view(np.uint8).reshape(-1, 4).T.tobytes(), 1)


def figures_of(
    data: bytes, wanted: Sequence[int], shape: tuple[int, ...], name: str = "the store"
) -> Iterator[tuple[int, Floats]]:
    """Yield figures of a row by their indices, which rise; `shape` is of all of them."""
    try:
        count = int.from_bytes(data[:4], "little")
        ends = [int(end) for end in np.cumsum(np.frombuffer(data, "<u4", count, 4))]
        first, at = 4 * (count + 1), -1
        values: Floats = np.zeros(0, np.float32)
        for index in wanted:
            block = index // _BLOCK
            if block != at:
                begin = ends[block - 1] if block else 0
                raw = np.frombuffer(
                    zlib.decompress(data[first + begin : first + ends[block]]), np.uint8
                )
                bits = np.ascontiguousarray(raw.reshape(4, -1).T).view(np.uint32)
                held = min(_BLOCK, shape[0] - block * _BLOCK)
                each = bits.reshape(held, -1, CHUNK)
                values = np.bitwise_xor.accumulate(each, axis=2).view(np.float32)
                at = block
            yield index, values[index % _BLOCK].reshape(shape[1:])
    except (ValueError, IndexError, zlib.error):
        raise DamagedError(f"{name}: a row is damaged") from None


def unpacked(data: bytes, shape: tuple[int, ...]) -> Floats:
    """Return all of a row's numbers."""
    return np.stack([values for _, values in figures_of(data, range(shape[0]), shape)])
