"""The folder a conversion works in: `TARGET.partial`, which becomes TARGET when it is complete.

Each file is written under a temporary name, renamed, and noted with its checksum. Killed at any
moment, a conversion that is started again with `resume` keeps every noted file whose bytes are
still what was noted, and writes the others. The source is only read.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import IO

from tutti.errors import InputError, TuttiError
from tutti.files import fingerprint, require_folder, unwritable
from tutti.huggingface.manifest import File
from tutti.units import bytes_text

_JOB = ".job.json"
_DONE = ".done.jsonl"
_WRITING = ".writing"
_HASH_BYTES = 1 << 22
Seen = Callable[[int], None]


def partial_of(target: Path) -> Path:
    """Return the folder in which a target is written."""
    return target.parent / f"{target.name}.partial"


def require_free(target: Path, *, resume: bool) -> None:
    """Refuse a target that is there already, or half there."""
    if target.exists() or target.is_symlink():
        raise InputError(f"{target}: exists already; choose another name or remove it")
    if partial_of(target).exists() and not resume:
        raise InputError(
            f"{partial_of(target)}: a conversion stopped half-way; go on with --resume, or remove "
            "that folder"
        )
    require_folder(target.parent)


class Workspace:
    """The half-written target of one conversion."""

    def __init__(self, target: Path, job: object, *, resume: bool) -> None:
        require_free(target, resume=resume)
        self.target = target
        self.folder = partial_of(target)
        self.done: dict[str, File] = {}
        self._job = fingerprint(job)
        self._lock: IO[str] | None = None
        if self.folder.exists():
            self._reopen()
        else:
            self._create()

    def _create(self) -> None:
        try:
            self.folder.mkdir()
            (self.folder / _JOB).write_text(json.dumps({"job": self._job}) + "\n")
        except OSError as error:
            raise _unwritable(self.folder, error) from None
        self._take()

    def _reopen(self) -> None:
        path = self.folder / _JOB
        try:
            job = json.loads(path.read_text(encoding="utf-8"))["job"]
        except (OSError, ValueError, KeyError, TypeError):
            raise InputError(
                f"{self.folder}: is no half-written conversion; remove it or choose another name"
            ) from None
        if job != self._job:
            raise InputError(
                f"{self.folder}: was begun from another source or with other options; remove it "
                "and start again"
            )
        self._take()
        (self.folder / _WRITING).unlink(missing_ok=True)

    def _take(self) -> None:
        self._lock = (self.folder / _JOB).open("r")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise InputError(f"{self.folder}: another conversion is writing there now") from None

    def __enter__(self) -> Workspace:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._lock is not None:
            self._lock.close()

    def keep_finished(self, names: Iterable[str], seen: Seen = lambda _bytes: None) -> None:
        """Find the files that were finished before and are still what they were."""
        known = set(names)
        log = self.folder / _DONE
        lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
        for line in lines:
            try:
                noted = json.loads(line)
                name, file = noted["file"], File(num_bytes=noted["bytes"], sha256=noted["sha256"])
            except (ValueError, KeyError, TypeError):
                continue  # the line that was being written when the process ended
            path = self.folder / name
            if name in known and path.is_file() and path.stat().st_size == file.num_bytes:
                if sha256_of(path, seen) == file.sha256:
                    self.done[name] = file
                else:
                    path.unlink()

    def require_room(self, num_bytes: int) -> None:
        """Refuse to begin what the disk cannot hold."""
        free = shutil.disk_usage(self.folder).free
        if num_bytes > free:
            raise TuttiError(
                f"{self.folder}: needs {bytes_text(num_bytes)} more, the disk has "
                f"{bytes_text(free)} free; make room and run again with --resume"
            )

    def write(self, name: str, blocks: Iterable[memoryview | bytes]) -> File:
        """Write one file and note it."""
        path, temporary = self.folder / name, self.folder / _WRITING
        digest, size = hashlib.sha256(), 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as stream:
                for block in blocks:
                    stream.write(block)
                    digest.update(block)
                    size += len(block)
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(path)
            file = File(num_bytes=size, sha256=digest.hexdigest())
            note = {"file": name, "bytes": size, "sha256": file.sha256}
            with (self.folder / _DONE).open("a", encoding="utf-8") as log:
                log.write(json.dumps(note) + "\n")
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise _unwritable(path, error) from None
        self.done[name] = file
        return file

    def finish(self) -> None:
        """Remove what only the work needed and give the folder its name."""
        try:
            for name in (_DONE, _JOB, _WRITING):
                (self.folder / name).unlink(missing_ok=True)
            self.folder.rename(self.target)
        except OSError as error:
            raise _unwritable(self.target, error) from None


def sha256_of(path: Path, seen: Seen = lambda _bytes: None) -> str:
    """Return the checksum of a file; `seen` hears how many bytes were read."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_HASH_BYTES):
            digest.update(block)
            seen(len(block))
    return digest.hexdigest()


def _unwritable(path: Path, error: OSError) -> TuttiError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return TuttiError(
            f"{path}: cannot be written ({error.strerror}); make room and run again with --resume"
        )
    return unwritable(path, error)
