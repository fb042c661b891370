"""Who hangs: the end of the chain of who waits for whom, read from the ranks' pulses. Pure.

When a rank stops, the others stop one after the other, each waiting for one that waits. So nothing
is said before no pulse has moved for a while; then whoever waits for nobody is to blame, or whoever
does not even look after its connections. One verdict, and no victim in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tutti.diagnose.waits import culprits
from tutti.observe.pulse import Activity, Reading

LINKS_SILENT_S = 1.5  # they beat every tenth of a second
BETWEEN_S = 120.0  # saves, validation and exports take their time
FIRST_STEP_S = 30.0  # compiling, graphs, fresh memory
_DATA = "Fetch batch"
ASLEEP = "sleeps"  # what is said of a process that does
_IN_STEP = (Activity.STEP, Activity.WAITING, Activity.DATA)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """A rank, as its agent sees it from outside."""

    chip: str
    reading: Reading
    state: str = ""  # of its process, as the kernel says: "T" is stopped, "R" runs
    instruction: str = ""  # the one it is at, in words
    call: str = ""  # of the kernel, that its main thread is in: "reads /data/3.jsonl"
    stray: str = ""  # an operation it is in that its plan does not have


class Reason(StrEnum):
    """Why a rank does not go on."""

    STOPPED = "stopped"
    LOCK = "lock"  # of the interpreter
    STRAY = "stray"  # in an operation that the others will not join
    CIRCLE = "circle"  # all wait for each other
    DATA = "data"  # its samples do not come
    FILE = "file"
    ASLEEP = "asleep"
    IDLE = "idle"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """A verdict."""

    rank: int
    chip: str
    reason: Reason
    why: str


def find_hang(
    ranks: Sequence[Observed], *, now_ns: int, after_s: float, first_step: int = 0
) -> Hang | None:
    """Return who keeps all others waiting; None while something moves.

    `ranks` are by rank. `after_s` is how long nothing may move in a step; in the one numbered
    `first_step`, longer.
    """
    if not ranks:
        return None
    idle_s = min(now_ns - seen.reading.beat_ns for seen in ranks) / 1e9
    if any(seen.reading.step <= first_step for seen in ranks):
        after_s += FIRST_STEP_S
    if idle_s < after_s:
        return None
    culprit = _culprit(ranks, now_ns)
    seen = ranks[culprit]
    outside = seen.reading.activity not in _IN_STEP
    if outside and idle_s < after_s + BETWEEN_S and not _silent(seen, now_ns):
        return None
    reason, why = _why(seen, idle_s, now_ns)
    return Hang(rank=culprit, chip=seen.chip, reason=reason, why=why)


def _silent(seen: Observed, now_ns: int) -> bool:
    """Tell whether even the thread that owns the connections stands still."""
    return seen.state in ("T", "t") or (now_ns - seen.reading.link_beat_ns) / 1e9 > LINKS_SILENT_S


def _waits(ranks: Sequence[Observed]) -> Mapping[int, set[int]]:
    return {
        rank: {p for op in seen.reading.operations for p in op.peers if p < len(ranks)} - {rank}
        for rank, seen in enumerate(ranks)
    }


def _culprit(ranks: Sequence[Observed], now_ns: int) -> int:
    silent = [rank for rank, seen in enumerate(ranks) if _silent(seen, now_ns)]
    if silent:  # one that is stopped cannot even say what it waits for
        stopped = [rank for rank in silent if ranks[rank].state in ("T", "t")]
        return min(stopped or silent, key=lambda rank: ranks[rank].reading.link_beat_ns)
    waits = _waits(ranks)
    ends: Sequence[int] = culprits(waits)
    if all(waits[rank] for rank in ends):  # in a circle: one is where the others will never be
        ends = [rank for rank, seen in enumerate(ranks) if seen.stray] or ends
    # of several, the one that came least far; where nobody waits for anybody, of all
    ends = ends or range(len(ranks))
    return min(ends, key=lambda rank: _progress(ranks[rank]))


def _progress(seen: Observed) -> tuple[int, int, int]:
    return seen.reading.step, seen.reading.instruction, seen.reading.beat_ns


def stray_of(operations: Iterable[str]) -> str:
    """Return the first operation of a step that its plan does not have; empty if none.

    Those of a plan are messages, and collectives in groups that are made for a use and named by it:
    "all_reduce gradients #3". What is called on all ranks has no use: "barrier #1".
    """
    for name in operations:
        verb, _, rest = name.partition(" ")
        if verb != "exchange" and not rest.rpartition("#")[0].strip():
            return name
    return ""


def _why(seen: Observed, idle_s: float, now_ns: int) -> tuple[Reason, str]:
    reading = seen.reading
    where = f"step {reading.step}"
    if reading.instruction >= 0:
        where += f", instruction {reading.instruction}"
        where += f" ({seen.instruction})" if seen.instruction else ""
    reason, how = _reason(seen, now_ns)
    return reason, f"hangs at {where}: {how}; nothing moved for {idle_s:.1f} s"


def _reason(seen: Observed, now_ns: int) -> tuple[Reason, str]:
    reading = seen.reading
    if seen.state in ("T", "t"):
        return Reason.STOPPED, "its process is stopped"
    if _silent(seen, now_ns):
        return Reason.LOCK, "it holds the interpreter's lock, or its host is overloaded"
    if seen.stray:
        how = f"it is in {seen.stray}, which its plan does not have and the others will not join"
        return Reason.STRAY, how
    if reading.operations:
        names = ", ".join(operation.name for operation in reading.operations[:3])
        return Reason.CIRCLE, f"it and the others wait for each other ({names})"
    asked = f" (its main thread {seen.call})" if seen.call else ""
    if seen.call and seen.call != ASLEEP:
        return Reason.FILE, f"its main thread {seen.call}, and it waits for nobody"
    if seen.instruction.startswith(_DATA) or reading.activity is Activity.DATA:
        return Reason.DATA, f"its samples do not come{asked}"
    if seen.call:
        return Reason.ASLEEP, f"its main thread {seen.call}, and it waits for nobody"
    return Reason.IDLE, "it waits for nobody and starts nothing"
