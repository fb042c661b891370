"""JSON files: one array of objects, or, as often, objects one per line under this ending."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tutti.document import shown
from tutti.errors import InputError
from tutti.train.data.sources.jsonl import JsonLinesReader
from tutti.train.data.sources.piece import FilePiece, Record, not_utf8, unreadable

PIECE_RECORDS = 20_000


class JsonArrayReader:
    """Reads .json files."""

    def __init__(self) -> None:
        self._lines = JsonLinesReader()

    def pieces(self, file: Path) -> list[FilePiece]:
        """Cut an array every so many records; lines as their own reader does."""
        if _is_lines(file):
            return self._lines.pieces(file)
        count, size = len(_items(str(file), _stamp(file))), file.stat().st_size
        return [
            FilePiece(
                file=str(file),
                start=start,
                stop=min(start + PIECE_RECORDS, count),
                num_bytes=size * (min(start + PIECE_RECORDS, count) - start) // count,
            )
            for start in range(0, count, PIECE_RECORDS)
        ]

    def fields(self, file: Path) -> list[str]:
        """Return the keys of the first object."""
        if _is_lines(file):
            return self._lines.fields(file)
        items = _items(str(file), _stamp(file))
        return list(_object(items[0], str(file), 0)) if items else []

    def records(self, piece: FilePiece, fields: Sequence[str]) -> Iterator[Record]:
        """Return the objects of a piece."""
        if _is_lines(Path(piece.file)):
            yield from self._lines.records(piece, fields)
            return
        items = _items(piece.file, _stamp(Path(piece.file)))
        for number in range(piece.start, piece.stop):
            yield Record(
                _object(items[number], piece.file, number),
                lambda number=number: _place(piece.file, number),  # type: ignore[misc]
            )


def _place(file: str, number: int) -> str:
    return f"{file}: item {number + 1}"


def _object(value: object, file: str, number: int) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError(
            f"{_place(file, number)}: expected an object with fields, found {shown(value)}"
        )
    return value


def _stamp(file: Path) -> tuple[int, int]:
    about = file.stat()
    return about.st_size, about.st_mtime_ns


def _is_lines(file: Path) -> bool:
    """Tell objects in lines from one array; a whole file of one object is a line of its own."""
    try:
        with file.open("rb") as stream:
            for line in stream:
                text = line.lstrip(b"\xef\xbb\xbf").strip()
                if text:
                    return text.startswith(b"{") and text.endswith(b"}")
    except OSError as error:
        raise unreadable(file, error) from None
    return False


@functools.lru_cache(maxsize=1)
def _items(file: str, stamp: tuple[int, int]) -> list[Any]:
    """Return a file's array; kept for the pieces that follow."""
    del stamp
    try:
        value = json.loads(Path(file).read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise unreadable(file, error) from None
    except UnicodeDecodeError as error:
        raise not_utf8(file, error) from None
    except json.JSONDecodeError as error:
        raise InputError(
            f"{file}: line {error.lineno}: not valid JSON ({error.msg} at column {error.colno})"
        ) from None
    except (RecursionError, ValueError) as error:
        raise InputError(f"{file}: not valid JSON ({error})") from None
    if not isinstance(value, list):
        raise InputError(
            f"{file}: expected an array of objects, found {shown(value)}; one object per line is "
            "read, too"
        )
    return value
