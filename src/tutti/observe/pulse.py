"""Pulse: what a rank is doing now, in a small file that other processes map and read.

The rank's own process only stores numbers; nobody has to answer a question. So its pulse can be
read while the process is stopped, holds the interpreter's lock, or is gone. The main thread writes
where it is (step, instruction, activity); the thread that owns the connections writes its beat and
the operations that are open, with the ranks they wait for. Times are `time.monotonic_ns`, which
all processes under one kernel share.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from tutti.errors import InputError

_MAGIC = b"tuttip01"
_HEAD = struct.Struct("<8sQQQ")  # magic, process, rank, generation
_MAIN = struct.Struct("<QqQQQ")  # step, instruction, activity, beats, time of the last
_LINKS = struct.Struct("<QQQ")  # number of a writing (odd while it goes on), beats, time
_OPERATION = struct.Struct("<40sQB7H")  # name, time of the last progress, peers, which
MOST_OPERATIONS, MOST_PEERS = 16, 7
_AT_MAIN = _HEAD.size
_AT_LINKS = _AT_MAIN + _MAIN.size
_AT_COUNT = _AT_LINKS + _LINKS.size
_AT_OPERATIONS = _AT_COUNT + 8
_BYTES = _AT_OPERATIONS + MOST_OPERATIONS * _OPERATION.size
_RETRIES = 8


class Activity(IntEnum):
    """What the main thread of a rank does."""

    STARTING = 0
    STEP = 1  # inside an instruction of its list
    WAITING = 2  # for an instruction that was started earlier
    DATA = 3  # for its samples
    BETWEEN = 4  # between two steps: figures, saves
    SAVING = 5
    MOVING = 6  # state, on the way into another generation
    IDLE = 7  # in no generation


class OpenOperation(NamedTuple):
    """A message or collective under way."""

    name: str
    peers: tuple[int, ...]  # the ranks that it waits for
    progress_ns: int  # when something of it last moved


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a pulse said when it was read."""

    process: int
    rank: int
    generation: int
    step: int  # the one at hand, counted from 1; 0 before the first
    instruction: int  # index in the rank's list; -1 outside of a step
    activity: Activity
    beats: int
    beat_ns: int
    link_beats: int
    link_beat_ns: int
    operations: tuple[OpenOperation, ...]


class Pulse:
    """A rank's pulse, as the rank writes it."""

    def __init__(self, path: Path, *, rank: int, generation: int = 0) -> None:
        """Make the file anew; a reader of the old one keeps what it has mapped."""
        self.path = path
        fresh = path.with_name(f".{path.name}.{os.getpid()}")
        with open(fresh, "w+b") as file:
            file.truncate(_BYTES)
            self._map = mmap.mmap(file.fileno(), _BYTES)
        self._rank, self._step, self._beats = rank, 0, 0
        self._link_beats = self._writings = 0
        now = time.monotonic_ns()
        _MAIN.pack_into(self._map, _AT_MAIN, 0, -1, Activity.STARTING, 0, now)
        _LINKS.pack_into(self._map, _AT_LINKS, 0, 0, now)
        self.enter(generation)
        os.replace(fresh, path)

    def enter(self, generation: int) -> None:
        """Say which generation the rank belongs to from now on."""
        _HEAD.pack_into(self._map, 0, _MAGIC, os.getpid(), self._rank, generation)

    def step(self, number: int) -> None:
        """Say which step begins, counted from 1."""
        self._step = number
        self.at(-1, Activity.BETWEEN)

    def at(self, instruction: int, activity: int = Activity.STEP) -> None:
        """Say at which instruction the main thread is: one store of 40 bytes."""
        self._beats += 1
        _MAIN.pack_into(
            self._map, _AT_MAIN,
            self._step, instruction, activity, self._beats, time.monotonic_ns(),
        )  # fmt: skip

    def links(self, operations: Iterable[tuple[str, Iterable[int], int]]) -> None:
        """Beat for the thread that owns the connections, and say what is open there.

        Each operation is its name, the ranks it waits for, and when it last moved (monotonic ns).
        """
        self._writings += 1
        self._link_beats += 1
        now = time.monotonic_ns()
        _LINKS.pack_into(self._map, _AT_LINKS, self._writings, self._link_beats, now)
        count = 0
        for name, peers, moved in operations:
            if count == MOST_OPERATIONS:
                break
            some = list(peers)[:MOST_PEERS]
            padded = some + [0] * (MOST_PEERS - len(some))
            at = _AT_OPERATIONS + count * _OPERATION.size
            text = name.encode(errors="replace")[:40]
            _OPERATION.pack_into(self._map, at, text, moved, len(some), *padded)
            count += 1
        struct.pack_into("<Q", self._map, _AT_COUNT, count)
        self._writings += 1
        _LINKS.pack_into(self._map, _AT_LINKS, self._writings, self._link_beats, now)

    def close(self) -> None:
        """Let go of the file, which stays."""
        self._map.close()


class PulseReader:
    """A rank's pulse, as its agent reads it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), _BYTES, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: no pulse of a rank ({error})") from None
        if _HEAD.unpack_from(self._map, 0)[0] != _MAGIC:
            self._map.close()
            raise InputError(f"{path}: no pulse of a rank, or one of another version")

    def read(self) -> Reading:
        """Return what it says now."""
        _, process, rank, generation = _HEAD.unpack_from(self._map, 0)
        step, instruction, activity, beats, beat_ns = _MAIN.unpack_from(self._map, _AT_MAIN)
        operations: tuple[OpenOperation, ...] = ()
        for _ in range(_RETRIES):  # the writer may be in the middle; if it died there, so be it
            before, link_beats, link_ns = _LINKS.unpack_from(self._map, _AT_LINKS)
            operations = tuple(self._operations())
            if before % 2 == 0 and _LINKS.unpack_from(self._map, _AT_LINKS)[0] == before:
                break
        return Reading(
            process=process,
            rank=rank,
            generation=generation,
            step=step,
            instruction=instruction,
            activity=Activity(activity),
            beats=beats,
            beat_ns=beat_ns,
            link_beats=link_beats,
            link_beat_ns=link_ns,
            operations=operations,
        )

    def _operations(self) -> Iterable[OpenOperation]:
        (count,) = struct.unpack_from("<Q", self._map, _AT_COUNT)
        for number in range(min(count, MOST_OPERATIONS)):
            at = _AT_OPERATIONS + number * _OPERATION.size
            name, moved, peers, *which = _OPERATION.unpack_from(self._map, at)
            text = name.rstrip(b"\0").decode(errors="replace")
            yield OpenOperation(text, tuple(which[: min(peers, MOST_PEERS)]), moved)

    def close(self) -> None:
        """Let go of the file."""
        with contextlib.suppress(BufferError):
            self._map.close()
