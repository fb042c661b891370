"""Where a checkpoint's files are: in a folder here, or under a URL.

Both say what the checkpoint is (`manifest`), whether it is whole (`damage`), and give bytes: whole
small files that are held against their checksums, and ranges of the ranks' files, whose tensors
have one each.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Protocol

from tutti.errors import DamagedError
from tutti.storage.ranged import STREAMS, read_into
from tutti.train.checkpoint.manifest import (
    Manifest,
    SavedFile,
    check_content,
    damage,
    read_checked,
    read_manifest,
)
from tutti.train.checkpoint.remote import RemoteCheckpoint, RemoteRun


class CheckpointFiles(Protocol):
    """One checkpoint."""

    @property
    def name(self) -> str:
        """What it is called, such as step-000100."""

    @property
    def place(self) -> str:
        """Where it is, for messages."""

    def manifest(self) -> Manifest:
        """Return what it says of itself."""

    def damage(self) -> str | None:
        """Say in one line why it is not whole; None if it is."""

    def read(self, name: str, files: Mapping[str, SavedFile]) -> bytes:
        """Return a small file, if it is what was saved."""

    def fill(self, name: str, start: int, memory: memoryview) -> None:
        """Fill memory with a range of a rank's file."""


class FolderFiles:
    """A checkpoint in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name, self.place = folder.name, str(folder)

    def manifest(self) -> Manifest:
        """Return what it says of itself."""
        return read_manifest(self.folder)

    def damage(self) -> str | None:
        """Say in one line why it is not whole; None if it is."""
        return damage(self.folder, thorough=True)

    def read(self, name: str, files: Mapping[str, SavedFile]) -> bytes:
        """Return a small file, if it is what was saved."""
        return read_checked(self.folder, name, files)

    def fill(self, name: str, start: int, memory: memoryview) -> None:
        """Fill memory with a range of a rank's file."""
        path = self.folder / name
        try:
            with path.open("rb", buffering=0) as stream:
                done = 0
                while done < memory.nbytes:
                    got = os.preadv(stream.fileno(), [memory[done:]], start + done)
                    if not got:
                        raise DamagedError(f"{path}: ends at byte {start + done}")
                    done += got
        except OSError as error:
            raise DamagedError(f"{path}: cannot be read ({error.strerror})") from None


class UrlFiles:
    """A checkpoint under a URL."""

    def __init__(
        self, run: RemoteRun, checkpoint: RemoteCheckpoint, streams: int = STREAMS
    ) -> None:
        self._run, self.checkpoint = run, checkpoint
        self._pool = ThreadPoolExecutor(streams, thread_name_prefix="ranges")
        self.name = checkpoint.name
        self.place = f"{run.folder.url}/{checkpoint.folder}"

    @cached_property
    def _manifest(self) -> Manifest:
        return self._run.manifest(self.checkpoint)

    def manifest(self) -> Manifest:
        """Return what it says of itself."""
        return self._manifest

    def damage(self) -> str | None:
        """Say in one line why it is not whole; None if it is."""
        return self._run.damage(self.checkpoint, self._pool)

    def read(self, name: str, files: Mapping[str, SavedFile]) -> bytes:
        """Return a small file, if it is what was saved."""
        content = self._run.folder.read(f"{self.checkpoint.folder}/{name}")
        return check_content(f"{self.place}/{name}", name, content, files)

    def fill(self, name: str, start: int, memory: memoryview) -> None:
        """Fill memory with a range of a rank's file, by several connections."""
        read_into(self._run.folder, f"{self.checkpoint.folder}/{name}", start, memory, self._pool)
