"""A disk or a mounted file system, measured: what 1 to n processes read and write in a folder.

Bytes are counted when they are on the disk, or came from there. Whatever goes wrong with the
folder on the way (full, read-only, gone) is one line, and nothing is left in it.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from tutti.errors import InputError
from tutti.files import require_folder
from tutti.hardware.profile import StorageAction, StorageFigure
from tutti.hardware.storage import StorageTier
from tutti.storage import disk_work
from tutti.storage.disk_work import SMALL_BYTES, DiskTime, DiskWork
from tutti.units import bytes_text, many

Report = Callable[[str, float, float], None]  # what is being measured, how much of it, of how much

_CHECKSUM_BYTES = 64 << 20
_START_S = 0.25  # before all processes of a measurement begin
_WORK: dict[StorageAction, Callable[[DiskWork], DiskTime]] = {
    StorageAction.WRITE: disk_work.write_large,
    StorageAction.READ: disk_work.read_large,
    StorageAction.WRITE_SMALL: disk_work.write_small,
    StorageAction.READ_SMALL: disk_work.read_small,
    StorageAction.FLUSH: disk_work.flush,
}
_LARGE = (StorageAction.WRITE, StorageAction.READ)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskQuestion:
    """What is measured, and how much of it."""

    folder: Path
    tier: StorageTier = StorageTier.FILE_SYSTEM
    num_bytes: int = 256 << 20  # of one process's file
    processes: int = 4  # at most; measured at 1, 2, 4, … of them
    small_operations: int = 200
    repeats: int = 3

    @property
    def counts(self) -> list[int]:
        """The numbers of processes that are measured."""
        counts = [1]
        while counts[-1] * 2 <= self.processes:
            counts.append(counts[-1] * 2)
        return counts if counts[-1] == self.processes else [*counts, self.processes]


def measure_disk(
    question: DiskQuestion, report: Report = lambda *_: None
) -> tuple[StorageFigure, ...]:
    """Measure a folder's storage; every way in which it fails is one line."""
    _require_room(question)
    try:
        scratch = Path(tempfile.mkdtemp(prefix=".tutti-profile-", dir=question.folder))
    except OSError as error:
        raise _refused(question.folder, error) from None
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(question.processes, mp_context=context) as pool:
            figures = list(_figures(question, scratch, pool, report))
    except BrokenProcessPool:
        raise InputError(
            f"{question.folder}: a process that measured it was ended from outside; try again"
        ) from None
    except OSError as error:
        raise _refused(question.folder, error) from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return tuple(figures)


def _require_room(question: DiskQuestion) -> None:
    folder = question.folder
    require_folder(folder)
    if not os.access(folder, os.W_OK):
        raise InputError(f"{folder}: cannot be written to; name a folder on that storage that can")
    needed = question.num_bytes * question.processes
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise _refused(folder, error) from None
    if free < needed * 1.05:
        raise InputError(
            f"{folder}: {bytes_text(free)} are free, {many(question.processes, 'file')} of "
            f"{bytes_text(question.num_bytes)} need {bytes_text(needed)}; make room, or measure "
            "with smaller files"
        )


def _refused(folder: Path, error: OSError) -> InputError:
    """Say what happened to the storage."""
    if error.errno == errno.ENOSPC or error.errno == errno.EDQUOT:
        return InputError(f"{folder}: became full while it was measured; make room and try again")
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return InputError(f"{folder}: cannot be written to ({error.strerror}); name another folder")
    if error.errno in (errno.ENOENT, errno.ESTALE, errno.ENODEV, errno.ENOTCONN):
        return InputError(
            f"{folder}: went away while it was measured ({error.strerror}); is it still mounted?"
        )
    return InputError(f"{folder}: cannot be measured ({error.strerror or error})")


def _figures(
    question: DiskQuestion, scratch: Path, pool: ProcessPoolExecutor, report: Report
) -> Iterator[StorageFigure]:
    whole = len(question.counts) * len(_WORK) + 1
    yield _checksum(question)
    done = 1
    for count in question.counts:
        for action in _WORK:
            report(f"{action.value.replace('_', ' ')}, {many(count, 'process', 'processes')}",
                   done, whole)  # fmt: skip
            yield _figure(question, scratch, pool, action, count)
            done += 1
    report("done", whole, whole)


def _figure(
    question: DiskQuestion,
    scratch: Path,
    pool: ProcessPoolExecutor,
    action: StorageAction,
    count: int,
) -> StorageFigure:
    """Return the median of several runs of so many processes together."""
    large = action in _LARGE
    operations = 1 if large else question.small_operations
    spans: list[float] = []
    beyond = True
    for _ in range(question.repeats if large else 1):
        times = _together(question, scratch, pool, action, count)
        spans.append(max(t.ended for t in times) - min(t.began for t in times))
        beyond = beyond and all(t.beyond_cache for t in times)
    seconds = max(statistics.median(spans), 1e-9)
    size = question.num_bytes if large else SMALL_BYTES
    return StorageFigure(
        tier=question.tier,
        action=action,
        processes=count,
        bytes=size,
        seconds=seconds / operations,
        bandwidth=size * operations * count / seconds,
        beyond_cache=beyond,
    )


def _together(
    question: DiskQuestion,
    scratch: Path,
    pool: ProcessPoolExecutor,
    action: StorageAction,
    count: int,
) -> list[DiskTime]:
    small = action is StorageAction.WRITE_SMALL
    start_at = time.monotonic() + _START_S
    works = [
        DiskWork(
            path=str(scratch / f"{'small' if small else 'large'}-{number}"),
            num_bytes=question.num_bytes,
            count=question.small_operations,
            start_at=start_at,
        )
        for number in range(count)
    ]
    return list(pool.map(_WORK[action], works))


def _checksum(question: DiskQuestion) -> StorageFigure:
    """Measure how fast this host takes checksums, for every tensor that is saved has one."""
    block = os.urandom(_CHECKSUM_BYTES)
    spans = []
    for _ in range(5):
        began = time.perf_counter()
        zlib.crc32(block)
        spans.append(max(time.perf_counter() - began, 1e-9))
    seconds = statistics.median(spans)
    return StorageFigure(
        tier=question.tier,
        action=StorageAction.CHECKSUM,
        processes=1,
        bytes=len(block),
        seconds=seconds,
        bandwidth=len(block) / seconds,
    )
