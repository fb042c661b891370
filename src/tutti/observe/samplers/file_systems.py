"""File systems that a run needs: how much room is left, and how long a small write and read take.

A file system that hangs keeps whoever asks it; so it is asked in a thread of its own, and how long
that has been waiting is a figure, too.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

from tutti.observe.figures import key
from tutti.observe.samplers.sampler import BackgroundSampler, Say, Values

_EVERY_S, _SHARE = 10.0, 0.01
_BYTES = 4096
_PROBE = ".latency-{name}"


class FileSystemSampler(BackgroundSampler):
    """The file systems of some folders; in the first one a small file is written and read."""

    def __init__(
        self,
        folders: Iterable[Path],
        name: str,
        say: Say = lambda _: None,
        *,
        every_s: float = _EVERY_S,
    ) -> None:
        super().__init__("file systems", every_s=every_s, share=_SHARE)
        self._folders = tuple(dict.fromkeys(folders))
        self._probe = self._folders[0] / _PROBE.format(name=name)
        self._say, self._said = say, False
        self._began: float | None = None  # when the round that is under way did
        self._mount = ""  # of the first folder

    def sample(self) -> Values:
        """Return the newest figures; how long one that does not answer has been asked."""
        values, began = super().sample(), self._began
        for name in ("file_system_write_seconds", "file_system_read_seconds"):
            at = key(name, self._mount)
            if at in values and began is not None:
                values[at] = max(values[at], time.monotonic() - began)
        return values

    def ask(self) -> Values:
        """Return room and latency."""
        self._began = time.monotonic()
        values: Values = {}
        try:
            for folder in self._folders:
                with contextlib.suppress(OSError):
                    values |= _room(folder)
            values |= self._latency()
        except OSError as error:
            if not self._said:
                self._say(f"{self._probe.parent}: no latency of its file system ({error.strerror})")
            self._said = True
        self._began = None
        return values

    def _latency(self) -> Values:
        self._mount = mount_of(self._probe.parent)
        began = time.monotonic()
        try:
            with self._probe.open("wb", buffering=0) as file:
                file.write(os.urandom(_BYTES))
                os.fsync(file.fileno())
                written = time.monotonic()
                if hasattr(os, "posix_fadvise"):  # or the kernel answers out of its own memory
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            with self._probe.open("rb", buffering=0) as file:
                file.read(_BYTES)
            done = time.monotonic()
        finally:
            self._probe.unlink(missing_ok=True)
        return {
            key("file_system_write_seconds", self._mount): written - began,
            key("file_system_read_seconds", self._mount): done - written,
        }


def _room(folder: Path) -> Values:
    """Return what is left for those who are not root."""
    own = os.statvfs(_existing(folder))
    mount = mount_of(folder)
    values = {key("file_system_free_bytes", mount): float(own.f_bavail * own.f_frsize)}
    if own.f_blocks:
        usable = own.f_blocks - own.f_bfree + own.f_bavail  # without what root alone may take
        values[key("file_system_free_ratio", mount)] = own.f_bavail / max(usable, 1)
    if own.f_files:  # some file systems do not count them
        values[key("file_system_free_inodes_ratio", mount)] = own.f_favail / own.f_files
    return values


def mount_of(folder: Path) -> str:
    """Return where the file system of a folder is mounted."""
    at = _existing(folder).resolve()
    while not os.path.ismount(at) and at != at.parent:
        at = at.parent
    return str(at)


def _existing(folder: Path) -> Path:
    """Return a folder, or the nearest above it that there is."""
    at = folder.absolute()
    while not at.exists() and at != at.parent:
        at = at.parent
    return at
