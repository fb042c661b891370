"""Published runs as rows: the CSV format, cell by cell, and why a row cannot be used.

Only configuration columns become shape, strategy and machine; measured columns are kept apart and
serve for scoring (and to refuse rows whose numbers cannot be right). Nothing is guessed: what a
row leaves open is answered by the conventions of its source, or the row is skipped.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tutti import files
from tutti.cost.calibration.conventions import Convention, convention, folded
from tutti.errors import InputError

REQUIRED = ("id", "group", "model", "chip", "n_gpus", "seq", "gbs", "step_time_s")
KNOWN = (
    *REQUIRED,
    *("layers", "hidden", "heads", "kv_heads", "ffn", "gated_mlp", "vocab", "experts", "topk"),
    *("tp", "pp", "vpp", "dp", "cp", "ep", "shard", "seq_par", "mbs", "recompute", "flash_attn"),
    *("precision", "mfu", "peak_mem_GiB", "config_complete", "notes"),
)
_NOT_GIVEN = ("", "n/a", "na", "none", "-", "null")
_MOST = {
    "layers": 10_000,
    "hidden": 1_000_000,
    "heads": 100_000,
    "kv_heads": 100_000,
    "ffn": 10_000_000,
    "vocab": 100_000_000,
    "seq": 100_000_000,
    "experts": 100_000,
    "topk": 10_000,
    "vpp": 1_000,
}
_MOST_OTHERS = 100_000_000  # degrees, batches, chips
MOST_STEP_SECONDS = 1e6
MOST_MEMORY_GIB = 1e6


class UnusableError(Exception):
    """A row that cannot be priced, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A row that was left out."""

    id: str
    why: str


@dataclass(frozen=True, slots=True)
class Cells:
    """One row of the file, read cell by cell."""

    values: Mapping[str, str]

    def text(self, column: str) -> str:
        """Return a cell without surrounding spaces; empty where the column is missing."""
        return self.values.get(column, "").strip()

    def is_given(self, column: str) -> bool:
        """Tell whether a cell says anything."""
        return self.text(column).casefold() not in _NOT_GIVEN

    def number(self, column: str, *, most: float) -> float:
        """Return a positive number; anything else makes the row unusable."""
        if not self.is_given(column):
            missing = "is empty" if column in self.values else "is missing: no such column"
            raise UnusableError(f"'{column}' {missing}")
        text = self.text(column)
        try:
            value = float(text)
        except ValueError:
            raise UnusableError(f"'{column}' is '{text[:40]}'; expected a plain number") from None
        if not math.isfinite(value) or not 0 < value <= most:
            raise UnusableError(
                f"'{column}' is {text[:40]}; expected a number above 0, at most {most:g}"
            )
        return value

    def count(self, column: str, default: float | None = None) -> float:
        """Return a whole number, or the default where the cell is empty."""
        if default is not None and not self.is_given(column):
            return default
        value = self.number(column, most=_MOST.get(column, _MOST_OTHERS))
        if value != int(value):
            raise UnusableError(f"'{column}' is {self.text(column)}; expected a whole number")
        return value

    def flag(self, column: str, default: float) -> float:
        """Return 0 or 1, or the default where the cell is empty."""
        if not self.is_given(column):
            return default
        text = self.text(column)
        if text not in ("0", "1"):
            raise UnusableError(f"'{column}' is '{text[:40]}'; expected 0 or 1")
        return float(text)

    def choice(self, column: str, words: Mapping[str, float], source: Convention) -> float:
        """Return what the first known word in a cell stands for."""
        text = folded(self.text(column))
        for word, value in words.items():
            if word in text:
                return value
        assumed = source.assume.get(column)
        if assumed is not None:
            return words[folded(assumed)]
        known = ", ".join(words)
        raise UnusableError(f"'{column}' is '{self.text(column)[:40]}'; known: {known}")


def read_cells(path: Path) -> list[Cells]:
    """Read the file; every row becomes cells, however wrong they are."""
    text = files.read_text(path)
    try:
        lines = list(csv.reader(io.StringIO(text, newline="")))
    except csv.Error as error:
        raise InputError(f"{path}: not a CSV file ({error})") from None
    header = [name.strip() for name in lines[0]] if lines else []
    if not any(header):
        raise InputError(f"{path}: is empty; a file of runs begins with a line of column names")
    if not set(header) & set(KNOWN):
        wanted = ", ".join(REQUIRED)
        raise InputError(f"{path}: no column of runs in its first line; it needs {wanted}")
    rows = enumerate(lines[1:], start=2)
    return [Cells(_named(header, line, number)) for number, line in rows if any(line)]


def _named(header: Sequence[str], line: Sequence[str], number: int) -> dict[str, str]:
    """Return a row by column; one without an id is called by its line."""
    row = dict(zip(header, [*line, *([""] * len(header))], strict=False))
    return row if row.get("id", "").strip() else {**row, "id": f"line {number}"}


def source_of(cells: Cells) -> Convention:
    """Return the conventions of a row's source."""
    return convention(cells.text("group"))
