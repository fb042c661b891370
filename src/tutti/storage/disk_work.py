"""What one process does to a disk while it is measured; run in processes of their own.

Writes end when the bytes are on the disk. Reads come from there, too: pages are dropped from the
cache first, and where the system keeps them, the file is read around it (O_DIRECT).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path

BLOCK_BYTES = 8 << 20
SMALL_BYTES = 4096
_CONTENT_BYTES = 64 << 20
_PROBES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskWork:
    """One process's part of a measurement."""

    path: str  # of its file, or its folder of small files
    num_bytes: int  # of the large file
    count: int  # of small operations
    start_at: float  # on the clock that all processes share


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskTime:
    """When one process began and ended, and whether the bytes came from the disk."""

    began: float
    ended: float
    beyond_cache: bool = True


def write_large(work: DiskWork) -> DiskTime:
    """Write a file from its beginning, and wait until it is on the disk."""
    # more than a processor's cache holds: what is written comes from memory, as a state does
    content = memoryview(os.urandom(min(_CONTENT_BYTES, work.num_bytes)))
    with contextlib.suppress(FileNotFoundError):
        os.unlink(work.path)
    handle = os.open(work.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        began = _begin(work)
        written = 0
        while written < work.num_bytes:
            start = written % content.nbytes
            size = min(BLOCK_BYTES, content.nbytes - start, work.num_bytes - written)
            written += os.write(handle, content[start : start + size])
        os.fsync(handle)
        return DiskTime(began=began, ended=time.monotonic())
    finally:
        os.close(handle)


def read_large(work: DiskWork) -> DiskTime:
    """Read a file from the disk."""
    handle, beyond = _open_uncached(work.path, work.num_bytes)
    try:
        with mmap.mmap(-1, BLOCK_BYTES) as memory, memoryview(memory) as block:
            began = _begin(work)
            done = 0
            while done < work.num_bytes and (got := os.preadv(handle, [block], done)):
                done += got
            ended = time.monotonic()
        if done < work.num_bytes:
            raise OSError(0, f"ended after {done} of {work.num_bytes} bytes", work.path)
        return DiskTime(began=began, ended=ended, beyond_cache=beyond)
    finally:
        os.close(handle)


def write_small(work: DiskWork) -> DiskTime:
    """Write many small files, each until it is on the disk."""
    folder, content = Path(work.path), os.urandom(SMALL_BYTES)
    folder.mkdir(exist_ok=True)
    began = _begin(work)
    for number in range(work.count):
        handle = os.open(folder / f"{number}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.write(handle, content)
            os.fsync(handle)
        finally:
            os.close(handle)
    return DiskTime(began=began, ended=time.monotonic())


def read_small(work: DiskWork) -> DiskTime:
    """Read small pieces from anywhere in a large file."""
    handle, beyond = _open_uncached(work.path, work.num_bytes)
    pieces = max(1, work.num_bytes // SMALL_BYTES)
    places = random.Random(work.count).choices(range(pieces), k=work.count)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_RANDOM)
    try:
        with mmap.mmap(-1, SMALL_BYTES) as memory, memoryview(memory) as block:
            began = _begin(work)
            for place in places:
                os.preadv(handle, [block], place * SMALL_BYTES)
            ended = time.monotonic()
        return DiskTime(began=began, ended=ended, beyond_cache=beyond)
    finally:
        os.close(handle)


def flush(work: DiskWork) -> DiskTime:
    """Append a little and wait until it is on the disk, again and again."""
    content = os.urandom(SMALL_BYTES)
    handle = os.open(f"{work.path}.flush", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        began = _begin(work)
        for _ in range(work.count):
            os.write(handle, content)
            os.fsync(handle)
        return DiskTime(began=began, ended=time.monotonic())
    finally:
        os.close(handle)


def _begin(work: DiskWork) -> float:
    """Wait for the moment at which all processes begin."""
    time.sleep(max(0.0, work.start_at - time.monotonic()))
    return time.monotonic()


def _open_uncached(path: str, num_bytes: int) -> tuple[int, bool]:
    """Open a file whose pages are in nobody's memory; tell whether that worked."""
    handle = os.open(path, os.O_RDONLY)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    if not _is_cached(handle, num_bytes):
        return handle, True
    with contextlib.suppress(OSError, AttributeError):
        around = os.open(path, os.O_RDONLY | os.O_DIRECT)
        os.close(handle)
        return around, True
    return handle, False  # memory itself (tmpfs), or a system that drops nothing


def _is_cached(handle: int, num_bytes: int) -> bool:
    """Tell whether some of a file lies in the page cache; where nobody can tell, it does."""
    block = bytearray(SMALL_BYTES)
    for probe in range(_PROBES):
        place = num_bytes * probe // _PROBES // SMALL_BYTES * SMALL_BYTES
        try:
            if os.preadv(handle, [block], place, os.RWF_NOWAIT):
                return True
        except BlockingIOError:
            continue
        except (OSError, AttributeError):
            return True
    return False
