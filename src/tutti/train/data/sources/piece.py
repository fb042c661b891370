"""`Piece`: a part of a file that one process reads, and what every reader offers.

A record is a text, or a mapping with the wanted fields; beside it stands its place for messages.
Places are made by a function, called only when something is wrong: finding a line number costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tutti.errors import InputError

PIECE_BYTES = 16 << 20  # what one process takes at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePiece:
    """Units [start, stop) of a file: bytes, row groups or record batches, as its reader counts."""

    file: str
    start: int
    stop: int
    num_bytes: int  # for progress


class Record(NamedTuple):
    """One record, and where it stands."""

    value: str | dict[str, Any]
    place: Callable[[], str]


class Reader(Protocol):
    """How files of one kind are read."""

    def pieces(self, file: Path) -> list[FilePiece]:
        """Return the parts of a file, in order."""

    def fields(self, file: Path) -> list[str] | None:
        """Return the names of the fields of the records; None where records are plain text."""

    def records(self, piece: FilePiece, fields: Sequence[str]) -> Iterator[Record]:
        """Return the records of a piece; of mappings at least these fields."""


def unreadable(file: str | Path, error: OSError) -> InputError:
    """Return the one line for a file that the system does not let us read."""
    return InputError(f"{file}: cannot be read ({error.strerror or error})")


def not_utf8(place: str, error: UnicodeDecodeError) -> InputError:
    """Return the one line for bytes that are no text."""
    return InputError(
        f"{place}: not valid UTF-8 (byte 0x{error.object[error.start]:02x} at {error.start}); "
        f"convert the file to UTF-8"
    )
