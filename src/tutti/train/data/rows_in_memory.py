"""Rows that a program holds, as a file that every rank reads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tutti import files
from tutti.document import shown
from tutti.errors import InputError


def rows_file(rows: Sequence[Any], folder: Path) -> Path:
    """Write rows into a run's folder under a name made of what they hold; return the file."""
    lines = []
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise InputError(
                f"fit: row {number} is {shown(row)}; expected a mapping such as {{'text': …}}"
            )
        try:
            lines.append(json.dumps(dict(row), ensure_ascii=False))
        except (TypeError, ValueError) as error:
            raise InputError(
                f"fit: row {number} cannot be written ({error}); give text and numbers"
            ) from None
    text = "\n".join(lines) + "\n"
    name = hashlib.sha256(text.encode()).hexdigest()[:12]
    path = folder.parent / f"{folder.name}-rows" / f"{name}.jsonl"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(path, text)
    return path


def tokenizer_of(rows: Sequence[Any], given: str) -> str:
    """Return the tokenizer of rows: as given, or one that is not asked for anything."""
    return given or ("bytes" if all("input_ids" in row for row in rows) else "")
