"""JSON lines: one object per line, read by ranges of bytes that end at line ends."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tutti.document import shown
from tutti.errors import InputError
from tutti.train.data.sources.piece import PIECE_BYTES, FilePiece, Record, not_utf8, unreadable


class JsonLinesReader:
    """Reads .jsonl files."""

    def pieces(self, file: Path) -> list[FilePiece]:
        """Cut the file at line ends, about PIECE_BYTES apart."""
        size = file.stat().st_size
        cuts = [0]
        with file.open("rb") as stream:
            while size - cuts[-1] > PIECE_BYTES:
                stream.seek(cuts[-1] + PIECE_BYTES)
                stream.readline()
                cuts.append(stream.tell())
        if cuts[-1] < size:
            cuts.append(size)
        return [
            FilePiece(file=str(file), start=start, stop=stop, num_bytes=stop - start)
            for start, stop in itertools.pairwise(cuts)
        ]

    def fields(self, file: Path) -> list[str]:
        """Return the keys of the first object."""
        for piece in self.pieces(file)[:1]:
            for record in self.records(piece, ()):
                assert isinstance(record.value, dict)
                return list(record.value)
        return []

    def records(self, piece: FilePiece, fields: Sequence[str]) -> Iterator[Record]:
        """Return the objects of the lines; blank lines are passed over."""
        del fields
        try:
            with open(piece.file, "rb") as stream:
                stream.seek(piece.start)
                at = piece.start
                while at < piece.stop:
                    line = stream.readline()
                    start, at = at, at + len(line)
                    if line.strip():
                        yield Record(
                            _object(line, piece.file, start),
                            lambda start=start: _place(piece.file, start),  # type: ignore[misc]
                        )
        except OSError as error:
            raise unreadable(piece.file, error) from None


def _place(file: str, start: int) -> str:
    """Return "file: line n" of the line that begins at a byte."""
    lines = 1
    with open(file, "rb") as stream:
        while start:
            block = stream.read(min(start, 1 << 20))
            lines += block.count(b"\n")
            start -= len(block)
    return f"{file}: line {lines}"


def _object(line: bytes, file: str, start: int) -> dict[str, Any]:
    try:
        value = json.loads(line.decode("utf-8-sig" if start == 0 else "utf-8"))
    except UnicodeDecodeError as error:
        raise not_utf8(_place(file, start), error) from None
    except json.JSONDecodeError as error:
        raise InputError(
            f"{_place(file, start)}: not valid JSON ({error.msg} at column {error.colno})"
        ) from None
    except (RecursionError, ValueError) as error:
        raise InputError(f"{_place(file, start)}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise InputError(
            f"{_place(file, start)}: expected an object with fields, found {shown(value)}"
        )
    return value
