"""Flight recorders' dumps as records: those of PyTorch (NCCL, gloo), in pickle or JSON.

A dump is what one rank wrote: its last collectives and messages, each with its group, its number
in the group, its sizes, and how far it came.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tutti.diagnose.dumps.values import plain_values
from tutti.errors import InputError

State = Literal["scheduled", "started", "completed"]
_RANK = re.compile(r"(\d+)(?:\.\w+)?$")
_PEER = re.compile(r"(?:send|recv) \d+(?:->|<-)(\d+)$")  # "nccl:recv 3<-0", ranks in the group


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One collective or message of a rank."""

    order: int  # in its rank's dump
    group: str
    number: int  # in the group
    operation: str
    library: str  # that carries it out: "nccl", "gloo"
    message: bool  # between two ranks
    sizes: tuple[tuple[int, ...], ...]
    types: tuple[str, ...]
    state: State
    frames: tuple[str, ...] = ()
    peer: int | None = None  # of a message: the other rank, as the group counts

    def words(self) -> str:
        """Return it as a person would say it."""
        shape = ", ".join("×".join(map(str, s)) or "scalar" for s in self.sizes)
        return f"{self.operation} {self.number} of group {self.group} ({shape}): {self.state}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """What one rank wrote."""

    rank: int
    file: str
    records: tuple[Record, ...]
    members: Mapping[str, tuple[int, ...]]  # of groups, as far as it says
    whole: bool = True  # its first records were not yet written over


def read_dumps(folder: Path) -> tuple[list[Dump], list[str]]:
    """Return the dumps in a folder, and notes about files that could not be used."""
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; name the one with the dumps of all ranks")
    dumps: dict[int, Dump] = {}
    notes: list[str] = []
    for path in sorted(p for p in folder.iterdir() if p.is_file() and _RANK.search(p.name)):
        try:
            dump = read_dump(path)
        except InputError as error:
            notes.append(str(error))
            continue
        if dump.rank in dumps:
            notes.append(f"{path}: rank {dump.rank} has another dump; the first is used")
        else:
            dumps[dump.rank] = dump
    if not dumps:
        said = f" ({notes[0]})" if notes else ""
        raise InputError(f"{folder}: no dump of a flight recorder in it{said}")
    return [dumps[rank] for rank in sorted(dumps)], notes


def read_dump(path: Path) -> Dump:
    """Read one rank's dump."""
    match = _RANK.search(path.name)
    if match is None:
        raise InputError(f"{path}: its name does not end with a rank")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    if not data:
        raise InputError(f"{path}: is empty")
    if data.lstrip()[:1] == b"{":
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            raise InputError(f"{path}: the dump is cut off or damaged") from None
    else:
        value = plain_values(data, str(path))
    try:
        return _dump(value, int(match.group(1)), str(path))
    except (KeyError, TypeError, ValueError, AttributeError):
        raise InputError(f"{path}: is no dump of a flight recorder") from None


def _dump(value: Any, rank: int, file: str) -> Dump:
    entries = value["entries"]
    if not isinstance(entries, list):
        raise TypeError
    members = {
        str(name): tuple(int(r) for r in json.loads(str(config.get("ranks") or "[]")))
        for name, config in (value.get("pg_config") or {}).items()
    }
    return Dump(
        rank=int(value.get("rank", rank)),
        file=file,
        records=tuple(_record(entry, i) for i, entry in enumerate(entries)),
        members={name: ranks for name, ranks in members.items() if ranks},
        whole=not entries or int(entries[0].get("record_id", 0)) == 0,
    )


def _record(entry: Mapping[str, Any], order: int) -> Record:
    group = entry["process_group"]
    message = bool(entry.get("is_p2p", False))
    peer = _PEER.search(str(entry["profiling_name"])) if message else None
    state: State = entry.get("state", "scheduled")
    if entry.get("retired") or entry.get("time_discovered_completed_ns"):
        state = "completed"  # gloo leaves the state as it was
    library, _, operation = str(entry["profiling_name"]).partition(":")
    return Record(
        order=order,
        group=str(group[0] if isinstance(group, (list, tuple)) else group),
        number=int(entry["p2p_seq_id" if message else "collective_seq_id"]),
        operation=operation or library,
        library=library,
        message=message,
        sizes=tuple(tuple(int(n) for n in size) for size in entry.get("input_sizes") or ()),
        types=tuple(str(t) for t in entry.get("input_dtypes") or ()),
        state=state if state in ("scheduled", "started") else "completed",
        frames=tuple(
            f"{f.get('filename')}:{f.get('line')} {f.get('name')}"
            for f in (entry.get("frames") or ())[:4]
        ),
        peer=int(peer[1]) if peer else None,
    )
