"""The embedded store of a job: its decisions as lines of a log in the run's folder, and its fence.

Every generation also leaves a file with its number for a name. Whoever publishes something for all
(a checkpoint) looks for them first: one of an older generation woke up late, and publishes nothing.
The greatest number counts, so one that sleeps while it writes its own lowers nothing.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tutti.elastic.messages import Seat
from tutti.errors import InputError, TuttiError
from tutti.observe.folder import ELASTIC, JOURNAL

FOLDER = ELASTIC
LOG = JOURNAL
GENERATION = "generation-"  # and its number
_FENCES = 3  # that stay: whoever looks while one comes finds another


class FencedError(TuttiError):
    """Somebody of an older generation wanted to write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One decision."""

    at: float  # seconds since 1970
    generation: int
    phase: str
    why: str
    step: int | None = None
    source: str = ""
    plan: str = ""
    ranks: tuple[str, ...] = ()  # chips
    seats: tuple[Seat, ...] = ()
    order: int = 0  # the number of the newest


class Journal:
    """The log, as the leading agent writes it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / FOLDER
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = (self.folder / LOG).open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise InputError(
                f"{self.folder}: the job's log cannot be written ({error.strerror})"
            ) from None

    def write(self, entry: Entry) -> None:
        """Write a decision; what was decided is on disk before anybody acts on it."""
        try:
            self._file.write(self.line(entry) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise TuttiError(
                f"{self._file.name}: {error.strerror}; without its log the job would not know "
                "its own generation"
            ) from None

    @staticmethod
    def line(entry: Entry) -> str:
        """Return a decision as it is written."""
        values = {name: getattr(entry, name) for name in entry.__slots__}
        return json.dumps({**values, "seats": msgspec.to_builtins(entry.seats)})

    def fence(self, generation: int) -> None:
        """Let nobody of an older generation publish from now on."""
        (self.folder / f"{GENERATION}{generation}").touch()
        for number in sorted(_fences(self.folder))[:-_FENCES]:
            (self.folder / f"{GENERATION}{number}").unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_journal(folder: Path) -> list[Entry]:
    """Return the decisions of a run; a last line that was cut off is left out."""
    path = folder / FOLDER / LOG
    if not path.is_file():
        raise InputError(f"{folder}: no elastic run: it has no {FOLDER}/{LOG}")
    entries = list[Entry]()
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            entries.append(entry_of(json.loads(line)))
        except (ValueError, TypeError, KeyError, msgspec.ValidationError):
            if number == len(lines):
                break
            raise InputError(f"{path}, line {number}: is no decision; was it changed?") from None
    return entries


def entry_of(values: dict[str, Any]) -> Entry:
    """Return a decision that was written."""
    seats = msgspec.convert(values.get("seats", []), tuple[Seat, ...])
    return Entry(**{**values, "ranks": tuple(values["ranks"]), "seats": seats})


def last_generation(folder: Path) -> int:
    """Return the number of the newest generation that a folder has seen; 0 if none."""
    return max(_fences(folder / FOLDER), default=0)


def _fences(folder: Path) -> list[int]:
    numbers = [path.name.removeprefix(GENERATION) for path in folder.glob(f"{GENERATION}*")]
    return [int(number) for number in numbers if number.isdecimal()]


def require_current(folder: Path, generation: int) -> None:
    """Raise where a newer generation has begun.

    The files count, also where the store is elsewhere: they lie beside what is to be published.
    """
    newest = last_generation(folder)
    if newest > generation:
        raise FencedError(
            f"generation {newest} has begun; this process is of generation {generation} and "
            "publishes nothing"
        )


def now() -> float:
    """Return the time that decisions are written with."""
    return time.time()
