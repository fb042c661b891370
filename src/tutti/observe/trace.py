"""A measured step as a Chrome trace, which Perfetto (ui.perfetto.dev) and Chrome open.

One process per rank, one thread per lane, a slice per instruction. What a rank measured counts from
its own begin of the step; ranks are laid over each other by their hosts' clocks. Pure but for the
file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tutti.files import write_text
from tutti.schedule.instruction import NO_MICRO_BATCH, Instruction, Lane

Event = dict[str, object]
_MICRO = 1e6
_THREADS = {lane: number for number, lane in enumerate(Lane)}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """When a rank's instructions ran, in seconds since `began`, and what they were."""

    name: str
    began: float  # of the host's clock
    instructions: tuple[Instruction, ...]
    start: tuple[float, ...]
    end: tuple[float, ...]


def write_measured_trace(path: Path, ranks: Sequence[RankTrace]) -> None:
    """Write the trace as a whole or not at all."""
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in trace_events(ranks))
    write_text(path, f'{{"displayTimeUnit":"ms","traceEvents":[\n{lines}\n]}}\n')


def trace_events(ranks: Sequence[RankTrace]) -> Iterator[Event]:
    """Yield names of processes and threads, then slices."""
    first = min((rank.began for rank in ranks), default=0.0)
    for number, rank in enumerate(ranks):
        yield {"ph": "M", "pid": number, "name": "process_name", "args": {"name": rank.name}}
        for lane in sorted({entry.lane for entry in rank.instructions}, key=_THREADS.__getitem__):
            about = {"ph": "M", "pid": number, "tid": _THREADS[lane]}
            yield {**about, "name": "thread_name", "args": {"name": lane.value}}
        late = rank.began - first
        for entry, start, end in zip(rank.instructions, rank.start, rank.end, strict=True):
            yield {
                "ph": "X",
                "pid": number,
                "tid": _THREADS[entry.lane],
                "name": _name(entry),
                "ts": round((late + start) * _MICRO, 3),
                "dur": round(max(0.0, end - start) * _MICRO, 3),
                "args": {"units": f"{entry.start}-{entry.stop}", "what": entry.what.value},
            }


def _name(entry: Instruction) -> str:
    batch = "" if entry.micro_batch == NO_MICRO_BATCH else f" {entry.micro_batch}"
    return f"{entry.op.value}{batch}"
