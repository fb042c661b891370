"""A real step of a plan: when each instruction ran on each rank. Written and read as a trace.

Compute ran from its start to its end; what goes over the network or to the host is shown from when
it was started until it was known to be over, so that waiting for other ranks is in it. A Send is
over when it was received.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tutti.cost.plan.simulator_inputs import FloatArray
from tutti.errors import InputError
from tutti.files import write_text
from tutti.schedule.listing import OPS, WHATS
from tutti.simulate.chrome import TraceArrow, TraceRow, chrome_text
from tutti.simulate.labels import labels_of
from tutti.simulate.program import Kind, Program

_KIND = "measured"
_INSIDE = 0.999  # an arrow must end inside its slice to be drawn at it


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeasuredRank:
    """One rank's step; times are seconds since the first rank began."""

    rank: int
    rank_class: int
    pool: str
    shift_s: float  # when it began
    step_s: float
    start: FloatArray
    end: FloatArray
    waited: FloatArray
    parts: Mapping[str, float]  # seconds by what the rank did: compute_s, bubble_s, …
    sources: Mapping[tuple[int, str], tuple[int, ...]] = field(default_factory=dict)
    """By boundary (unit, what): the ranks that a Receive gets its parts from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRun:
    """What a group of ranks ran in a step: one collective of one size, and its program."""

    use: str
    ranks: tuple[int, ...]
    operation: str
    bytes: float  # of the whole buffer, as a plan counts them
    algorithm: str
    chunks: int
    by: str  # "plan", or "cost" where the plan says nothing, "override", "caller"
    calls: int


def run_from_document(value: Mapping[str, Any]) -> CollectiveRun:
    """Read what `asdict` made of a run, by way of JSON."""
    return CollectiveRun(**{**value, "ranks": tuple(value["ranks"])})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeasuredStep:
    """A real step; `ranks` in rank order."""

    step: int
    ranks: tuple[MeasuredRank, ...]
    collectives: tuple[CollectiveRun, ...] = ()
    clock: str = ""  # how the ranks' clocks were laid over each other
    emulated: bool = False

    @property
    def step_seconds(self) -> float:
        """From the first rank's begin to the last one's end."""
        return max(each.shift_s + each.step_s for each in self.ranks)

    def of_class(self, index: int) -> list[MeasuredRank]:
        """Return the ranks of a class."""
        return [each for each in self.ranks if each.rank_class == index]


def write_measured(path: Path, program: Program, measured: MeasuredStep) -> None:
    """Write the trace as a whole or not at all."""
    about = {
        "kind": _KIND,
        "step": measured.step,
        "step_seconds": measured.step_seconds,
        "clock": measured.clock,
        "emulated": measured.emulated,
        "ranks": [
            {
                "rank": own.rank,
                "class": own.rank_class,
                "pool": own.pool,
                "shift_s": own.shift_s,
                "step_s": own.step_s,
                "parts": dict(own.parts),
            }
            for own in measured.ranks
        ],
        "collectives": [asdict(run) for run in measured.collectives],
    }
    rows = measured_rows(program, measured.ranks)
    write_text(path, chrome_text(program, rows, _arrows(program, measured), about))


def measured_rows(program: Program, ranks: Sequence[MeasuredRank]) -> list[TraceRow]:
    """Return a row for each rank, named as its class is."""
    labels = labels_of(program.schedule)
    return [
        TraceRow(
            name=f"rank {own.rank} · {labels[own.rank_class].name} · {own.pool}",
            rank_class=own.rank_class,
            start=own.start,
            end=own.end,
            waited=own.waited,
        )
        for own in ranks
    ]


def settled(program: Program, measured: MeasuredStep) -> MeasuredStep:
    """Return the step with Sends that are over when all that they were for have received them.

    Nobody waits for a Send before the step ends, so its own rank does not know when it was over.
    """
    arrivals: dict[tuple[int, int], float] = {}  # (row, position) → the last one's arrival
    for receiver, at, senders in _moves(program, measured):
        for send in senders:
            arrivals[send] = max(arrivals.get(send, 0.0), float(measured.ranks[receiver].end[at]))
    ends = [own.end.copy() for own in measured.ranks]
    for (row, position), arrival in arrivals.items():
        start = float(measured.ranks[row].start[position])
        ends[row][position] = max(start, min(float(ends[row][position]), arrival))
    ranks = [replace(own, end=end) for own, end in zip(measured.ranks, ends, strict=True)]
    return replace(measured, ranks=tuple(ranks))


def _moves(
    program: Program, measured: MeasuredStep
) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """Yield row and position of each Receive, and those of the Sends that it gets parts from."""
    rows = {own.rank: row for row, own in enumerate(measured.ranks)}
    sends: dict[tuple[int, int], int] = {}  # (rank, meeting) → position
    for own in measured.ranks:
        span = program.span(own.rank_class)
        for i in np.flatnonzero(program.kind[span] == Kind.SEND).tolist():
            sends[own.rank, int(program.meeting[span.start + i])] = i
    for row, own in enumerate(measured.ranks):
        span = program.span(own.rank_class)
        for i in np.flatnonzero(program.kind[span] == Kind.RECEIVE).tolist():
            flat = span.start + i
            key = (int(program.first[flat]), WHATS[int(program.what[flat])].value)
            meeting = int(program.meeting[flat])
            peers = [peer for peer in own.sources.get(key, ()) if (peer, meeting) in sends]
            yield row, i, [(rows[peer], sends[peer, meeting]) for peer in peers]


def _arrows(program: Program, measured: MeasuredStep) -> Iterator[TraceArrow]:
    """Yield a flow to each Receive from whichever of its Sends was over last."""
    ranks = measured.ranks
    for receiver, i, senders in _moves(program, measured):
        if not senders:
            continue
        sender, at = max(senders, key=lambda send: float(ranks[send[0]].end[send[1]]))
        begin, end = float(ranks[receiver].start[i]), float(ranks[receiver].end[i])
        over = float(ranks[sender].end[at])
        yield TraceArrow(
            source=(sender, at, float(ranks[sender].start[at])),
            target=(receiver, i, min(max(begin, over), begin + _INSIDE * (end - begin))),
        )


def read_measured(path: Path, program: Program) -> MeasuredStep:
    """Return the real step of a trace that was written for the same plan."""
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
        about, events = written["otherData"], written["traceEvents"]
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{path}: is no trace; name a trace-step-N.json of a run") from None
    if not isinstance(about, dict) or about.get("kind") != _KIND:
        raise InputError(
            f"{path}: is a simulated trace; name a trace-step-N.json that "
            "`tutti train --trace N` wrote"
        )
    slices: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] == "X":
            slices.setdefault(int(event["pid"]), []).append(event)
    ranks = [
        _rank(path, program, known, slices.get(row, [])) for row, known in enumerate(about["ranks"])
    ]
    return MeasuredStep(
        step=int(about["step"]),
        ranks=tuple(ranks),
        collectives=tuple(map(run_from_document, about.get("collectives", ()))),
        clock=str(about.get("clock", "")),
        emulated=bool(about.get("emulated", False)),
    )


def _rank(
    path: Path, program: Program, known: Mapping[str, Any], slices: Sequence[Mapping[str, Any]]
) -> MeasuredRank:
    index = int(known["class"])
    other = InputError(f"{path}: is of another plan; give the plan.json beside it")
    if index >= len(program.schedule.classes):
        raise other
    span = program.span(index)
    names = [OPS[code].value for code in program.op[span].tolist()]
    if names != [event["name"] for event in slices]:
        raise other
    start = np.array([event["ts"] for event in slices], dtype=np.float64) / 1e6
    length = np.array([event["dur"] for event in slices], dtype=np.float64) / 1e6
    waited = [event["args"].get("waited_us", 0.0) / 1e6 for event in slices]
    return MeasuredRank(
        rank=int(known["rank"]),
        rank_class=index,
        pool=str(known["pool"]),
        shift_s=float(known["shift_s"]),
        step_s=float(known["step_s"]),
        start=start,
        end=start + length,
        waited=np.array(waited, dtype=np.float64),
        parts={str(name): float(value) for name, value in known["parts"].items()},
    )
