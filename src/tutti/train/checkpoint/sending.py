"""Ranks send a checkpoint from the run's folder to its URL together; rank 0 names it there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from tutti.errors import TuttiError
from tutti.train.checkpoint import folders
from tutti.train.checkpoint.coordinator import Coordinator
from tutti.train.checkpoint.manifest import read_manifest
from tutti.train.checkpoint.remote import RemoteCheckpoint, RemoteRun, shares

Superseded = Callable[[list[tuple[int, int]]], set[int]]  # of (serial, step): the steps that may go


class Sending:
    """Sends the checkpoints of one run, on one rank."""

    def __init__(
        self,
        remote: RemoteRun,
        together: Coordinator,
        superseded: Superseded,
        may_publish: Callable[[], None],
    ) -> None:
        self._remote, self._together = remote, together
        self._superseded, self._may_publish = superseded, may_publish

    def send(self, path: Path) -> str:
        """Send a complete checkpoint; every rank calls this. Return the problem, if any."""
        together = self._together
        problem = ""
        try:
            manifest = read_manifest(path)
            names = shares(manifest.files, together.rank, together.size)
            self._remote.send_files(path, manifest, names)
        except (TuttiError, OSError) as error:
            problem = f"rank {together.rank}: {error}"
        told = together.gather(problem)
        if told is not None:
            problem = next((text for text in told if text), "")
            if not problem:
                try:
                    self._may_publish()
                    self._remote.publish(path, manifest, self._superseded)
                except (TuttiError, OSError) as error:
                    problem = str(error)
        return str(together.broadcast((problem,))[0])

    def unsent(self, folder: Path) -> Path | None:
        """Return the newest checkpoint of a folder if the URL lacks it; all ranks ask."""
        name = ""
        if self._together.rank == 0:
            newest = folders.newest_first(folder)
            if newest:
                path, manifest = newest[0]
                named: Mapping[str, RemoteCheckpoint] = {
                    c.name: c for c in self._remote.newest_first()
                }
                there = named.get(path.name)
                if there is None or there.serial != manifest.serial:
                    name = str(path)
        name = self._together.broadcast((name,))[0]
        return Path(name) if name else None

    def next_serial(self) -> int:
        """Return the number that the next save has at least, by what is under the URL."""
        checkpoints = self._remote.newest_first()
        return checkpoints[0].serial + 1 if checkpoints else 1

    def make_latest(self, name: str, serial: int) -> None:
        """Let an older checkpoint count as saved last."""
        checkpoints = self._remote.newest_first()
        self._remote.write_index(
            [replace(c, serial=serial) if c.name == name else c for c in checkpoints]
        )
