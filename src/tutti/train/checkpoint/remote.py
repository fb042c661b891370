"""Checkpoints of a run under a URL: sent in the background, named only when they are whole.

A checkpoint's files go to a folder of their own, which no other checkpoint ever uses. When all are
there, one small file, `checkpoints.json`, is written anew: it alone says which checkpoints exist.
Whatever moment a process ends at, every checkpoint that it names is whole; what was being sent is
in nobody's way, and is gone on with when the run goes on. Needs no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tutti.document import Count, Natural, Place, build, plain_fields
from tutti.errors import DamagedError, InputError, TuttiError
from tutti.files import fingerprint, parse_json
from tutti.storage.url import RemoteFile, RemoteFolder
from tutti.train.checkpoint.folders import LATEST, Which, step_of
from tutti.train.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    SavedFile,
    check_content,
    parse_manifest,
)

INDEX = "checkpoints.json"
FORMAT = "tutti-checkpoints/1"
_FILES_AT_ONCE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteCheckpoint:
    """A checkpoint that the index names."""

    name: str
    step: Natural
    serial: Count
    folder: str  # under the URL
    manifest: SavedFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """What `checkpoints.json` says."""

    checkpoints: tuple[RemoteCheckpoint, ...] = ()


class RemoteRun:
    """All checkpoints of a run that are under a URL."""

    def __init__(self, url: str) -> None:
        """Open a URL; nothing is asked of it yet."""
        self.folder = RemoteFolder(url)

    # --- looking ---------------------------------------------------------------------------

    def newest_first(self) -> list[RemoteCheckpoint]:
        """Return the checkpoints, the one that was saved last first."""
        content = self.folder.read_if_there(INDEX)
        if content is None:
            return []
        place = Place(f"{self.folder.url}/{INDEX}")
        try:
            value = parse_json(content.decode("utf-8"), place.file)
        except UnicodeDecodeError:
            raise DamagedError(f"{place.file}: is damaged: not a text") from None
        if not isinstance(value, dict) or value.pop("format", None) != FORMAT:
            raise DamagedError(f"{place.file}: is no index of checkpoints ('{FORMAT}')")
        checkpoints = build(Index, value, place).checkpoints
        return sorted(checkpoints, key=lambda checkpoint: -checkpoint.serial)

    def resolve(self, which: Which) -> list[RemoteCheckpoint]:
        """Return those that a person means: "latest" (all, the newest first), a step, a name."""
        checkpoints = self.newest_first()
        if str(which) == LATEST:
            return checkpoints
        return [c for c in checkpoints if which in (c.step, c.name)]

    def manifest(self, checkpoint: RemoteCheckpoint) -> Manifest:
        """Return what a checkpoint says of itself."""
        name = f"{checkpoint.folder}/{MANIFEST}"
        content = self.folder.read(name)
        where = f"{self.folder.url}/{name}"
        check_content(where, MANIFEST, content, {MANIFEST: checkpoint.manifest})
        return parse_manifest(content.decode("utf-8"), where)

    def damage(self, checkpoint: RemoteCheckpoint, pool: ThreadPoolExecutor) -> str | None:
        """Say in one line why a checkpoint is not whole; None if it is."""
        try:
            files = self.manifest(checkpoint).files
            there = pool.map(lambda name: self.folder.file(f"{checkpoint.folder}/{name}"), files)
            for name, file, seen in zip(files, files.values(), there, strict=True):
                if problem := _difference(file, seen):
                    raise DamagedError(f"{self.folder.url}/{checkpoint.folder}/{name}: {problem}")
        except InputError as error:
            return str(error)
        return None

    # --- sending ---------------------------------------------------------------------------

    def send_files(self, source: Path, manifest: Manifest, names: Sequence[str]) -> int:
        """Send some of a checkpoint's files; those that are there already are not sent again."""
        target = folder_of(source, manifest)

        def send(name: str) -> int:
            there = self.folder.file(f"{target}/{name}")
            if not _difference(manifest.files[name], there):
                return 0
            return self.folder.upload(source / name, f"{target}/{name}")

        with ThreadPoolExecutor(_FILES_AT_ONCE, thread_name_prefix="send") as pool:
            return sum(pool.map(send, names))

    def publish(
        self, source: Path, manifest: Manifest, gone: Callable[[list[tuple[int, int]]], set[int]]
    ) -> None:
        """Name a checkpoint whose files are all there; `gone` says which steps may go then."""
        target = folder_of(source, manifest)
        with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
            seen = list(pool.map(lambda n: self.folder.file(f"{target}/{n}"), manifest.files))
        for (name, file), there in zip(manifest.files.items(), seen, strict=True):
            if problem := _difference(file, there):
                raise TuttiError(f"{self.folder.url}/{target}/{name}: {problem}")
        text = (source / MANIFEST).read_bytes()
        self.folder.write(f"{target}/{MANIFEST}", text)
        digest = hashlib.sha256(text).hexdigest()
        fresh = RemoteCheckpoint(
            name=source.name,
            step=manifest.progress.step,
            serial=manifest.serial,
            folder=target,
            manifest=SavedFile(num_bytes=len(text), sha256=digest),
        )
        kept = [fresh, *(c for c in self.newest_first() if c.name != fresh.name)]
        steps = gone([(c.serial, c.step) for c in kept])
        self.write_index([c for c in kept if c.step not in steps])
        self._tidy()

    def write_index(self, checkpoints: Collection[RemoteCheckpoint]) -> None:
        """Say which checkpoints there are."""
        written = {"format": FORMAT, **plain_fields(Index(checkpoints=tuple(checkpoints)))}
        self.folder.write(INDEX, (json.dumps(written, indent=1) + "\n").encode())

    def _tidy(self) -> None:
        """Delete what the index does not name (any more); best effort, for it is only room."""
        named = {c.folder for c in self.newest_first()}
        for name in self.folder.folders():
            if name not in named and step_of(name.partition(".")[0]) is not None:
                self.folder.remove_folder(name)


def folder_of(source: Path, manifest: Manifest) -> str:
    """Return the folder of a checkpoint under the URL: the same one when it is sent again."""
    facts = [manifest.serial, manifest.saved_at, manifest.plan_hash, sorted(manifest.files)]
    return f"{source.name}.{fingerprint(facts)}"


def shares(files: Collection[str], rank: int, size: int) -> list[str]:
    """Return the files that a rank sends: its own, and of the rest those that fall to it."""
    return [name for name in sorted(files) if _owner(name) % size == rank]


def _owner(name: str) -> int:
    """Return the rank that wrote a file; what belongs to no rank is rank 0's."""
    middle = name.removeprefix("__").partition("_")[0]
    return int(middle) if name.startswith("__") and middle.isdigit() else 0


def _difference(expected: SavedFile, stored: RemoteFile | None) -> str:
    if stored is None:
        return "is missing"
    if stored.num_bytes != expected.num_bytes:
        return f"expected {expected.num_bytes} bytes, found {stored.num_bytes}"
    return ""
