"""Logs as they lie about, line by line: packed, cut off, coloured, in any encoding, of any size.

Only lines that pass the gate become text; of the others no more than their number is kept, so that
memory does not grow with a log.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tutti.diagnose.logs.gate import Gate
from tutti.errors import InputError
from tutti.files import meant_instead

BLOCK_BYTES = 4 << 20
LONGEST_LINE = 4000  # characters of a line that are looked at
_PACKED: dict[bytes, Any] = {
    b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\x00": lzma.open,
}  # fmt: skip
_ARCHIVES = {
    b"PK\x03\x04": "a zip archive", b"7z\xbc\xaf": "a 7z archive",
    b"\x28\xb5\x2f\xfd": "packed by zstd",
}  # fmt: skip
_TAR, _TAR_AT = b"ustar", 257  # packed or not: members of an archive are no lines of one log
STANDARD_INPUT = Path("/dev/stdin")
_MARKS = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}
_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_COMMAND = re.compile(r"\[(?:'[^']*', ?){4,}'[^']*'\]")  # a launcher shows the command it ran
_LOCAL_RANK = re.compile(r"local_rank=\d+")  # whose command it was: of DeepSpeed's launcher
_NEVER_LOGS = (
    ".py", ".pt", ".pth", ".bin", ".safetensors", ".png", ".jpg", ".so", ".npy", ".npz", ".pyc",
    ".zip", ".tar", ".pickle", ".pkl", ".parquet", ".arrow", ".sqlite", ".db",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Line:
    """A line that may matter."""

    file: str
    number: int  # from 1
    text: str


@dataclass(slots=True)
class LogFile:
    """What was read of one file."""

    name: str
    lines: int = 0
    bytes: int = 0
    orderly: bool = False  # whether it tells of anything that goes its way
    notes: list[str] = field(default_factory=list)


def log_files(paths: list[Path]) -> list[Path]:
    """Return the files that are meant: folders are searched; "-" is what is piped in."""
    files: list[Path] = []
    for path in paths:
        if str(path) == "-":
            files.append(STANDARD_INPUT)
        elif path.is_dir():
            inside = sorted(
                p for p in path.rglob("*")
                if p.is_file() and p.suffix not in _NEVER_LOGS and not p.name.startswith(".")
            )  # fmt: skip
            if not inside:
                raise InputError(f"{path}: no file in it may be a log")
            files += inside
        elif path.exists():
            files.append(path)
        else:
            raise InputError(f"{path}: no such file{meant_instead(path, folders=True)}")
    return list(dict.fromkeys(files))


def cleaned(text: str) -> str:
    """Return a line as text alone: without colours, overwritten progress and control characters."""
    if "\r" in text:
        text = " ".join(part for part in text.split("\r") if part.strip())
    if not text.isprintable():
        text = _CONTROL.sub("", _ESCAPES.sub("", text))
    if "['" in text:
        text = _COMMAND.sub(_shortened, text)
    return text.rstrip()


def _shortened(command: re.Match[str]) -> str:
    local = _LOCAL_RANK.search(command.group())
    return f"[… {local.group()}]" if local else "[…]"


def loud_lines(
    path: Path, gate: Gate, seen: LogFile, *, whole_bytes: int,
    reached: Callable[[int], None] = lambda _: None,
) -> Iterator[Line]:  # fmt: skip
    """Yield the lines of a file that pass the gate; `seen` learns what was read.

    `reached` hears after every block how far in the file, as it lies packed, that is.
    """
    try:
        with path.open("rb") as raw:
            head = raw.peek(6)[:6]  # a pipe cannot go back
            if archive := next((a for mark, a in _ARCHIVES.items() if head.startswith(mark)), ""):
                seen.notes.append(f"{path}: {archive}; unpack it first")
                return
            opener = next((o for mark, o in _PACKED.items() if head.startswith(mark)), None)
            stream = opener(raw) if opener else raw
            encoding = _MARKS.get(head[:2])
            goes_back = raw.seekable()  # a pipe does not say where it is
            for block in _loud(
                stream, encoding, gate, seen, whole_bytes, packed=opener is not None
            ):
                yield from block
                reached(raw.tell() if goes_back else seen.bytes)
    except OSError as error:
        seen.notes.append(f"{path}: cannot be read ({error.strerror or error})")


def loud_lines_of(text: bytes, gate: Gate, seen: LogFile, *, whole_bytes: int) -> Iterator[Line]:
    """Yield the lines that pass the gate of a text that is in no file."""
    for block in _loud(io.BytesIO(text), None, gate, seen, whole_bytes, packed=False):
        yield from block


def _loud(
    stream: Any, encoding: str | None, gate: Gate, seen: LogFile, whole: int, *, packed: bool
) -> Iterator[Iterator[Line]]:
    """Yield the lines that pass, block by block."""
    rest = b""
    decoder = codecs.getincrementaldecoder(encoding)("replace") if encoding else None
    while True:
        block = _next(stream, seen)
        if not seen.bytes and block[_TAR_AT:].startswith(_TAR):
            seen.notes.append(f"{seen.name}: a tar archive; unpack it first")
            return
        if not seen.bytes and decoder is None and _binary(block):
            seen.notes.append(f"{seen.name}: not text; left out")
            return
        seen.bytes += len(block)
        last = not block
        if decoder is not None:
            block = decoder.decode(block, last).encode()
        block = rest + block
        cut = len(block) if last else block.rfind(b"\n") + 1
        if not cut and len(block) > BLOCK_BYTES:  # one endless line
            cut = len(block)
        rest = block[cut:]
        size = max(whole, seen.bytes) if not packed else 1 << 40 if seen.bytes > 1 << 20 else whole
        seen.orderly = seen.orderly or _is_orderly(block)
        yield _of_block(block[:cut], gate, seen, size)
        if last:
            return


def _next(stream: Any, seen: LogFile) -> bytes:
    """Return a block; what comes before the damage of a packed file is kept."""
    parts: list[bytes] = []
    size = 0
    try:
        while size < BLOCK_BYTES and (part := stream.read1(BLOCK_BYTES)):
            parts.append(part)
            size += len(part)
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error):
        seen.notes.append(f"{seen.name}: its packing ends early; read as far as it goes")
    return b"".join(parts)


_LOOKED_AT = 1 << 16  # bytes at either end of a block
_ORDERLY = re.compile(
    rb"(?i)\b(?:steps?|iter(?:ation)?s?|epochs?|loss|it/s|samples|tokens|progress|saved|saving|"
    rb"finished|completed?|success(?:ful(?:ly)?)?|done|start(?:ed|ing)|listening|load(?:ed|ing)|"
    rb"info|ready|running)\b|\d%|\bkernel: |\[I\b|\bI\d{4} "
)
_UNWRITTEN = bytes(set(range(32)) - set(b"\t\n\r\x1b\b\f"))


def _binary(block: bytes) -> bool:
    head = block[:4096]
    return len(head) - len(head.translate(None, _UNWRITTEN)) > len(head) // 20


def _is_orderly(block: bytes) -> bool:
    return any(_ORDERLY.search(part) for part in (block[-_LOOKED_AT:], block[:_LOOKED_AT]))


def _of_block(block: bytes, gate: Gate, seen: LogFile, whole_bytes: int) -> Iterator[Line]:
    at, number = 0, seen.lines + 1
    for position in gate.positions(block, whole_bytes=whole_bytes):
        start = block.rfind(b"\n", 0, position) + 1
        end = block.find(b"\n", position)
        end = len(block) if end < 0 else end
        number += block.count(b"\n", at, start)
        at = start
        first = max(start, min(position - LONGEST_LINE // 2, end - LONGEST_LINE))
        text = block[first : first + LONGEST_LINE if first + LONGEST_LINE < end else end]
        yield Line(seen.name, number, cleaned(text.decode("utf-8", "replace")))
    seen.lines += block.count(b"\n") + (0 if block.endswith(b"\n") or not block else 1)
