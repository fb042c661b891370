"""Arrays inside an HTML page: one deflated block in base64, and a directory of what is where."""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

_ALIGNMENT = 8  # a JavaScript typed array must begin at a multiple of its item size
_NAMES = {"u1": "Uint8", "u2": "Uint16", "u4": "Uint32", "f4": "Float32"}


class Pack:
    """Collects arrays under names."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0
        self.directory: dict[str, list[object]] = {}

    def add(self, name: str, values: npt.NDArray[Any], kind: str = "") -> str:
        """Store an array as `kind` (u1, u2, u4, f4; by its values if empty); return its name."""
        if name in self.directory:
            raise ValueError(f"two arrays are called '{name}'")
        kind = kind or smallest(values)
        data = values.astype(f"<{kind}").tobytes()
        self.directory[name] = [_NAMES[kind], self._size, len(values)]
        padded = data + bytes(-len(data) % _ALIGNMENT)
        self._parts.append(padded)
        self._size += len(padded)
        return name

    def text(self) -> str:
        """Return all arrays as one base64 text."""
        return base64.b64encode(zlib.compress(b"".join(self._parts), 6)).decode()


def smallest(values: npt.NDArray[Any]) -> str:
    """Return the narrowest unsigned kind that holds whole, non-negative numbers."""
    most = int(values.max(initial=0))
    return "u1" if most < 2**8 else "u2" if most < 2**16 else "u4"


def ticks(values: npt.NDArray[np.float64], whole: float) -> npt.NDArray[np.uint32]:
    """Return times 0…whole as 32-bit fractions: finer than a float32 in the same space."""
    scale = (2.0**32 - 1) / whole if whole > 0 else 0.0
    return np.clip(np.rint(values * scale), 0, 2.0**32 - 1).astype(np.uint32)
