"""What the agents of an elastic run saw of ranks that did not move: files beside the rings.

A rank that hangs can say nothing, and one that was killed even less. So its host's agent writes
what it sees from outside (the pulse, the kernel's word for the process) as long as nothing moves on
the host, and takes it back when something does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tutti.files import write_text
from tutti.observe.pulse import Activity, OpenOperation, Reading


@dataclass(frozen=True, slots=True, kw_only=True)
class Still:
    """A rank, as it was when its agent last looked."""

    rank: int
    chip: str
    generation: int
    step: int
    instruction: int
    activity: int
    idle_s: float
    links_idle_s: float
    state: str  # the kernel's letter for its process
    call: str  # of the kernel, that its main thread was in
    operations: tuple[tuple[str, tuple[int, ...]], ...]
    file: str = ""  # that says so
    at: float = 0.0  # seconds since 1970

    def reading(self, now_ns: int) -> Reading:
        """Return the pulse as it was, `now_ns` being when the agent looked."""
        return Reading(
            process=0,
            rank=self.rank,
            generation=self.generation,
            step=self.step,
            instruction=self.instruction,
            activity=Activity(self.activity),
            beats=0,
            beat_ns=now_ns - int(self.idle_s * 1e9),
            link_beats=0,
            link_beat_ns=now_ns - int(self.links_idle_s * 1e9),
            operations=tuple(OpenOperation(name, peers, 0) for name, peers in self.operations),
        )


def still_path(folder: Path, host: str) -> Path:
    """Return the file of a host's agent."""
    return folder / f"still-{host.replace('/', '-')}.json"


def write_still(path: Path, world: int, ranks: Sequence[Still]) -> None:
    """Write what an agent sees of its ranks, of so many in all."""
    written = [{k: v for k, v in asdict(r).items() if k not in ("file", "at")} for r in ranks]
    document = {"at": time.time(), "world": world, "ranks": written}
    write_text(path, json.dumps(document) + "\n")


def read_still(folder: Path) -> list[Still]:
    """Return all ranks of the newest generation by rank; none unless every one stood still."""
    by_generation: dict[int, dict[int, Still]] = {}
    worlds: dict[int, int] = {}
    for path in sorted(folder.glob("still-*.json")):
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            for values in document["ranks"]:
                operations = tuple((str(n), tuple(map(int, p))) for n, p in values["operations"])
                given = {**values, "operations": operations, "at": float(document["at"])}
                still = Still(**given, file=str(path))
                by_generation.setdefault(still.generation, {})[still.rank] = still
                worlds[still.generation] = int(document["world"])
        except (OSError, ValueError, TypeError, KeyError):
            continue  # half written, or of another version
    newest = max(by_generation, default=0)
    ranks = by_generation.get(newest, {})
    return [ranks[r] for r in sorted(ranks)] if len(ranks) == worlds.get(newest) else []
