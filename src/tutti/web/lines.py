"""A file of JSON lines that grows: what came since it was last read. Pure but for the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_MOST_BYTES = 64 << 20  # read at once; more comes with the next call


class GrowingLines:
    """Reads whole lines only; starts over where the file was cut or replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset, self._file = 0, (0, 0)
        self.starts = 0  # how often it was read from its begin

    def more(self) -> list[dict[str, Any]]:
        """Return the objects of lines that are new."""
        try:
            status = self._path.stat()
        except OSError:
            return []
        same = (status.st_dev, status.st_ino)
        if same != self._file or status.st_size < self._offset:
            self._file, self._offset = same, 0
            self.starts += 1
        if status.st_size == self._offset:
            return []
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(_MOST_BYTES)
        except OSError:
            return []
        cut = data.rfind(b"\n") + 1
        self._offset += cut
        return [value for line in data[:cut].splitlines() if (value := _object(line)) is not None]


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
