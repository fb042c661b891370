"""Ring: a rank's flight recorder, for any chip: its last events in a file of fixed size.

The file is mapped into memory, so an event is one copy of 40 bytes; what was written stays when the
process is killed, and others read it while the rank runs or hangs. An event is a step that begins
or ends, an instruction that is started or issued, or a wait that begins or is over. The head says
whose ring it is and what its instructions are. An event carries its number twice, at its begin and
its end: where the two differ, it was just being written, and a reader leaves it out.
"""

from __future__ import annotations

import json
import mmap
import os
import platform
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from tutti.errors import DamagedError, InputError

VERSION = 1
_MAGIC = b"tuttirng"
_HEAD = struct.Struct("<8sIIIIqQIQ")  # magic, version, rank, world, events, clock, process, names,
# and when the process was last alive
_ALIVE = struct.Struct("<Q")
_HOST_BYTES = 64
_AT_ALIVE = _HEAD.size - _ALIVE.size
_EVENTS_FIELD, _AT_EVENTS = struct.Struct("<I"), 20  # in the head
_EVENT = struct.Struct("<QQIiQQ")  # number, monotonic ns, step, instruction, kind, number
_pack, _clock = _EVENT.pack_into, time.monotonic_ns
_MOST_NAMES = 64 << 20
EVENTS = 1 << 14  # kept; a power of two


class Kind(IntEnum):
    """What happened."""

    STEP = 1  # begins
    STEP_END = 2
    START = 3  # of an instruction
    ISSUED = 4  # the host has done its part of it
    WAIT = 5  # begins, for an instruction
    DONE = 6  # the wait is over


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """An instruction of a rank's list, as others see it."""

    words: str
    lane: str
    meets: str = ""  # what makes it the same operation on another rank; "" where none takes part
    bytes: float = 0.0


class Event(NamedTuple):
    """One entry of a ring."""

    number: int
    time_ns: int  # monotonic
    step: int
    instruction: int  # index in the rank's list; -1 of a step
    kind: Kind


class Ring:
    """A rank's ring, as the rank writes it."""

    def __init__(
        self,
        path: Path,
        *,
        rank: int,
        world: int,
        instructions: Sequence[Listed],
        events: int = EVENTS,
    ) -> None:
        if events & (events - 1):
            raise ValueError("a ring's events are a power of two")
        names = json.dumps([asdict(one) for one in instructions]).encode()
        head = _HEAD.pack(
            _MAGIC, VERSION, rank, world, events,
            time.time_ns() - time.monotonic_ns(), os.getpid(), len(names), time.monotonic_ns(),
        ) + platform.node().encode()[:_HOST_BYTES].ljust(_HOST_BYTES, b"\0") + names  # fmt: skip
        self._first = -(-len(head) // 64) * 64
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w+b") as file:
            file.truncate(self._first + events * _EVENT.size)
            self._map = mmap.mmap(file.fileno(), 0)
        self._map[: len(head)] = head
        self._mask, self._count = events - 1, 0
        self._closed, self._lock = threading.Event(), threading.Lock()
        self.step = 0

    def note(self, kind: int, instruction: int = -1) -> None:
        """Write down an event."""
        number = self._count = self._count + 1
        _pack(
            self._map, self._first + (number & self._mask) * 40,
            number, _clock(), self.step, instruction, kind, number,
        )  # fmt: skip

    def begin_step(self, number: int) -> None:
        """Write down that a step begins; all that follows is of it."""
        self.step = number
        self.note(Kind.STEP)

    def keep_alive(self, every_s: float = 1.0) -> None:
        """Write down every second that the process lives, whatever its main thread does."""

        def beat() -> None:
            while not self._closed.wait(every_s):
                with self._lock:
                    if not self._closed.is_set():
                        _ALIVE.pack_into(self._map, _AT_ALIVE, _clock())

        threading.Thread(target=beat, name="ring", daemon=True).start()

    def close(self) -> None:
        """Let go of the file, which stays."""
        with self._lock:
            self._closed.set()
            self._map.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class RingReading:
    """What a ring said when it was read."""

    file: str
    rank: int
    world: int
    host: str
    process: int
    clock_ns: int  # wall clock less monotonic
    alive_ns: int  # when the process was last known to live; monotonic
    instructions: tuple[Listed, ...]
    events: tuple[Event, ...]  # oldest first


def read_ring(path: Path) -> RingReading:
    """Read a ring, which may be being written."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    if len(data) < _HEAD.size + _HOST_BYTES or data[:8] != _MAGIC:
        raise InputError(f"{path}: is no ring of a rank")
    _, version, rank, world, events, clock, process, names, alive = _HEAD.unpack_from(data)
    if version != VERSION:
        raise InputError(f"{path}: a ring of version {version}; this tutti reads {VERSION}")
    start = _HEAD.size + _HOST_BYTES
    first = -(-(start + names) // 64) * 64
    if names > _MOST_NAMES or len(data) < first + events * _EVENT.size:
        raise DamagedError(f"{path}: the ring is cut off")
    try:
        listed = tuple(Listed(**one) for one in json.loads(data[start : start + names]))
    except (ValueError, TypeError):
        raise DamagedError(f"{path}: the ring's list of instructions is damaged") from None
    host = data[_HEAD.size : start].rstrip(b"\0").decode("utf-8", "replace")
    return RingReading(
        file=str(path), rank=rank, world=world, host=host, process=process, clock_ns=clock,
        alive_ns=alive,
        instructions=listed, events=_events(data[first : first + events * _EVENT.size]),
    )  # fmt: skip


def shortened_ring(path: Path, events: int) -> bytes:
    """Return a ring's file with no more than its newest events, a power of two of them."""
    ring = read_ring(path)
    data = path.read_bytes()
    names = _HEAD.unpack_from(data)[7]
    start = _HEAD.size + _HOST_BYTES
    first = -(-(start + names) // 64) * 64
    out = bytearray(first + events * _EVENT.size)
    out[: start + names] = data[: start + names]
    _EVENTS_FIELD.pack_into(out, _AT_EVENTS, events)
    for number, moment, step, instruction, kind in ring.events[-events:]:
        at = first + (number & (events - 1)) * _EVENT.size
        _pack(out, at, number, moment, step, instruction, kind, number)
    return bytes(out)


def _events(data: bytes) -> tuple[Event, ...]:
    events = [
        Event(number, moment, step, instruction, Kind(kind))
        for number, moment, step, instruction, kind, again in _EVENT.iter_unpack(data)
        if number == again and number and 1 <= kind <= len(Kind)
    ]
    return tuple(sorted(events))


def read_rings(folder: Path, *, most: int | None = None) -> tuple[list[RingReading], list[str]]:
    """Return the rings in a folder by rank, and notes about those that cannot be used.

    `most` is of how many files, the newest ones.
    """
    by_rank: dict[int, RingReading] = {}
    notes: list[str] = []
    paths = sorted(folder.glob("rank-*.ring"))
    if most is not None:
        paths = sorted(sorted(paths, key=_changed)[-most:])
    for path in paths:
        try:
            ring = read_ring(path)
        except InputError as error:
            notes.append(str(error))
            continue
        by_rank[ring.rank] = ring
    newest = max(by_rank.values(), key=lambda r: r.alive_ns + r.clock_ns, default=None)
    rings = [by_rank[r] for r in sorted(by_rank) if newest and by_rank[r].world == newest.world]
    if len(rings) < len(by_rank):
        notes.append(f"{len(by_rank) - len(rings)} rings of an earlier run are left out")
    return rings, notes


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def ring_path(folder: Path, rank: int) -> Path:
    """Return where a rank's ring lies in the folder of rings."""
    return folder / f"rank-{rank:05d}.ring"
