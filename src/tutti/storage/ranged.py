"""Large files at URLs, read in ranges by several connections at once.

One connection to an object store reaches a fraction of what a node's NIC carries; many ranges at
the same time fill it. A file that is fetched to the disk goes on where it was left: a journal
beside it says which ranges are there, each with its checksum.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tutti.errors import InputError
from tutti.files import unwritable
from tutti.storage.url import RemoteError, RemoteFile, RemoteFolder

RANGE_BYTES = 4 << 20
STREAMS = 8
Report = Callable[[int, int], None]  # bytes that are here, of how many


@dataclass(frozen=True, slots=True)
class Range:
    """A part of a file."""

    start: int
    length: int


def ranges(start: int, length: int, each: int = RANGE_BYTES) -> Iterator[Range]:
    """Cut a part of a file into ranges."""
    for offset in range(0, length, each):
        yield Range(start + offset, min(each, length - offset))


def read_into(
    folder: RemoteFolder,
    name: str,
    start: int,
    memory: memoryview,
    pool: ThreadPoolExecutor,
    each: int = RANGE_BYTES,
) -> None:
    """Fill memory with a part of a file, by as many connections as the pool has threads."""

    def fill(part: Range) -> None:
        offset = part.start - start
        memory[offset : offset + part.length] = folder.read(name, part.start, part.length)

    for _ in pool.map(fill, ranges(start, memory.nbytes, each)):
        pass


def fetch(
    folder: RemoteFolder,
    file: RemoteFile,
    target: Path,
    *,
    streams: int = STREAMS,
    each: int = RANGE_BYTES,
    report: Report = lambda _done, _whole: None,
) -> int:
    """Bring a file to the disk, whole or not at all; return the bytes that were read now.

    What an earlier attempt left beside the target is used, if the file is still the same one.
    """
    partial = target.with_name(f".{target.name}.part")
    journal = _Journal(target.with_name(f".{target.name}.ranges"), file, each)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        done = journal.checked(partial)
        missing = [part for part in ranges(0, file.num_bytes, each) if part.start not in done]
        read = sum(part.length for part in missing)
        before = file.num_bytes - read
        report(before, file.num_bytes)
        handle = os.open(partial, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            os.ftruncate(handle, file.num_bytes)
            with ThreadPoolExecutor(streams, thread_name_prefix="fetch") as pool:

                def bring(part: Range) -> Range:
                    content = folder.read(file.name, part.start, part.length)
                    os.pwrite(handle, content, part.start)
                    journal.add(part, zlib.crc32(content))
                    return part

                for part in pool.map(bring, missing):
                    before += part.length
                    report(before, file.num_bytes)
            os.fsync(handle)
        finally:
            os.close(handle)
            journal.close()
        _require_same(folder, file, partial, journal)
        os.replace(partial, target)
        journal.remove()
    except OSError as error:
        raise unwritable(target, error) from None
    return read


def _require_same(folder: RemoteFolder, file: RemoteFile, partial: Path, journal: _Journal) -> None:
    """Refuse a file that was changed while it was read: its ranges may be of two files."""
    now = folder.file(file.name)
    if now is None or now.identity != file.identity:
        partial.unlink(missing_ok=True)
        journal.remove()
        what = "was removed" if now is None else "was changed"
        raise RemoteError(f"{folder.url}/{file.name}: {what} while it was read; start again")


class _Journal:
    """Which ranges of a file are on the disk."""

    def __init__(self, path: Path, file: RemoteFile, each: int) -> None:
        self._path, self._each = path, each
        self._head = json.dumps({"file": file.name, "identity": file.identity, "each": each})
        self._size = file.num_bytes
        self._handle: int | None = None

    def checked(self, partial: Path) -> set[int]:
        """Return where the ranges begin that are there and sound; begin the journal anew."""
        try:
            head, *lines = self._path.read_text(encoding="utf-8").splitlines()
            handle = os.open(partial, os.O_RDONLY)
        except (OSError, ValueError):
            head, lines, handle = "", [], -1
        sound: dict[int, int] = {}
        if head == self._head:
            for line in lines:
                start, _, crc = line.partition(" ")
                if start.isdigit() and crc.isdigit() and int(start) < self._size:
                    length = min(self._each, self._size - int(start))
                    if zlib.crc32(os.pread(handle, length, int(start))) == int(crc):
                        sound[int(start)] = int(crc)
        if handle >= 0:
            os.close(handle)
        kept = "".join(f"{start} {crc}\n" for start, crc in sound.items())
        self._path.write_text(f"{self._head}\n{kept}", encoding="utf-8")
        self._handle = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        return set(sound)

    def add(self, part: Range, crc: int) -> None:
        """Note a range that was written."""
        assert self._handle is not None
        os.write(self._handle, f"{part.start} {crc}\n".encode())

    def close(self) -> None:
        """Write no more."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def remove(self) -> None:
        """Forget everything: the file is whole, or of no use."""
        self._path.unlink(missing_ok=True)


def require_file(folder: RemoteFolder, name: str) -> RemoteFile:
    """Return a file that must be there."""
    file = folder.file(name)
    if file is None:
        raise InputError(f"{folder.url}/{name}: no such file")
    return file
