"""Who writes in a run's folder: one job at a time, held by a lock of the kernel. Needs no torch.

The lock ends with the processes that hold it, however they end. A job of this machine holds it in
the process that starts the ranks and in its first rank; a launched one in the process that the
launcher calls rank 0. A folder that is moved away or deleted meanwhile is made and claimed anew. On
a shared file system it holds on all hosts, where that file system has locks; where it has none, the
job goes on without and says so.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from datetime import datetime
from pathlib import Path

from tutti.errors import InputError
from tutti.files import unwritable

LOCK = ".lock"
PATIENCE_S = 3.0  # for a job that is just ending
_PAUSE_S = 0.1
_DELETED = " (deleted)"  # as Linux marks a path that is gone
_UNSUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


class Claim:
    """A run's folder, held by this process until it ends or lets go."""

    def __init__(self, descriptor: int, note: str = "") -> None:
        self.descriptor = descriptor  # a process that inherits it holds the folder, too
        self.note = note  # what a person should know of it

    def release(self) -> None:
        """Let go, as far as this process is concerned."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def claim(folder: Path, *, wait_s: float = PATIENCE_S) -> Claim:
    """Hold a folder, which is made if need be; refuse where another job holds it."""
    make_folder(folder)
    path = folder / LOCK
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise unwritable(path, error) from None
    until = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                return Claim(descriptor, f"{folder}: its file system has no locks; see to it "
                             "that no other job writes there")  # fmt: skip
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
        if time.monotonic() >= until:
            holder = _holder(descriptor)
            os.close(descriptor)
            raise InputError(
                f"{folder}: another job writes there now{holder}; wait for it, end it, or name "
                "another --output"
            )
        time.sleep(_PAUSE_S)
    own = {"host": socket.gethostname(), "pid": os.getpid(), "since": int(time.time())}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, (json.dumps(own) + "\n").encode(), 0)
    return Claim(descriptor)


def make_folder(folder: Path) -> None:
    """Make the folder for everything that a run writes."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except PermissionError as error:
        raise unwritable(folder, error) from None
    except OSError as error:
        raise InputError(f"output '{folder}': cannot be made ({error.strerror})") from None


class Home:
    """A claimed folder while a run writes in it by its name, and where it went."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._holder = self._named()
        self._descriptor = os.open(folder, os.O_RDONLY)
        self._claim = Claim(-1)

    def lost(self) -> str:
        """Return what became of the folder, nothing as long as it has its name.

        A folder of that name is made and claimed anew; refused where another job has it by now.
        """
        if self._folder.is_dir() and self._named() == self._holder:
            return ""
        became = self._became()
        held = claim(self._folder, wait_s=0)
        self.close()
        self._claim, self._descriptor = held, os.open(self._folder, os.O_RDONLY)
        self._holder = self._named()
        return became

    def close(self) -> None:
        """Look after it no longer."""
        os.close(self._descriptor)
        self._claim.release()

    def _named(self) -> bytes | None:
        """Return who holds the folder that has the name now; None: nobody, or it is not there."""
        try:
            return (self._folder / LOCK).read_bytes()
        except OSError:
            return None

    def _became(self) -> str:
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(self._folder), os.fstat(self._descriptor)):
                return ""  # its lock alone was deleted
        try:
            place = os.readlink(f"/proc/self/fd/{self._descriptor}")
        except OSError:  # a system that does not tell
            return "was moved or deleted"
        return "was deleted" if place.endswith(_DELETED) else f"was moved to {place}"


def _holder(descriptor: int) -> str:
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
        since = datetime.fromtimestamp(holder["since"]).strftime("%Y-%m-%d %H:%M:%S")
        return f" (process {holder['pid']} of {holder['host']}, since {since})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""
