"""Who writes in a run's folder: one job at a time, held by a lock of the kernel. Needs no torch.

The lock ends with the processes that hold it, however they end. A job of this machine holds it in
the process that starts the ranks and in its first rank; a launched one in the process that the
launcher calls rank 0. On a shared file system it holds on all hosts, where that file system has
locks; where it has none, the job goes on without and says so.
"""

from __future__ import annotations

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


def _holder(descriptor: int) -> str:
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
        since = datetime.fromtimestamp(holder["since"]).strftime("%Y-%m-%d %H:%M:%S")
        return f" (process {holder['pid']} of {holder['host']}, since {since})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""
