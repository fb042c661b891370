"""Plain text: a file is a document, or every block between blank lines is one."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from tutti.train.data.sources.piece import PIECE_BYTES, FilePiece, Record, not_utf8, unreadable

_BLANK = re.compile(rb"\n[ \t\r]*\n\s*")


class TextReader:
    """Reads .txt and .md files."""

    def __init__(self, *, blocks: bool) -> None:
        self._blocks = blocks

    def fields(self, file: Path) -> None:
        """Records are plain text."""
        del file

    def pieces(self, file: Path) -> list[FilePiece]:
        """Return whole files, or cut them at blank lines."""
        size = file.stat().st_size
        cuts = [0, size]
        if self._blocks:
            cuts = _cuts(file, size)
        return [
            FilePiece(file=str(file), start=start, stop=stop, num_bytes=stop - start)
            for start, stop in itertools.pairwise(cuts)
            if stop > start
        ]

    def records(self, piece: FilePiece, fields: Sequence[str]) -> Iterator[Record]:
        """Return the documents."""
        del fields
        try:
            with open(piece.file, "rb") as stream:
                stream.seek(piece.start)
                data = stream.read(piece.stop - piece.start)
        except OSError as error:
            raise unreadable(piece.file, error) from None
        if not self._blocks:
            yield Record(_decoded(data, piece.file), lambda: piece.file)
            return
        for number, block in enumerate(_BLANK.split(data)):
            place = f"{piece.file}: block {number + 1} behind byte {piece.start}"
            text = _decoded(block, place).strip("\r\n")
            if text.strip():
                yield Record(text, lambda place=place: place)  # type: ignore[misc]


def _decoded(data: bytes, place: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise not_utf8(place, error) from None


def _cuts(file: Path, size: int) -> list[int]:
    """Return byte offsets at blank lines, about PIECE_BYTES apart."""
    cuts = [0]
    with file.open("rb") as stream:
        while size - cuts[-1] > PIECE_BYTES:
            stream.seek(cuts[-1] + PIECE_BYTES)
            blank = _BLANK.search(stream.read(PIECE_BYTES))
            if blank is None:
                break
            cuts.append(cuts[-1] + PIECE_BYTES + blank.end())
    return [*cuts, size]
