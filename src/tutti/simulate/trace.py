"""A simulated step as a Chrome trace, which Perfetto (ui.perfetto.dev) and Chrome open.

One process per class of ranks, one thread per lane or channel, a slice per instruction, an arrow
from each Send to its Receives. Times are microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tutti.files import write_text
from tutti.schedule.instruction import NO_MICRO_BATCH
from tutti.schedule.listing import OPS, WHATS
from tutti.simulate.labels import ClassLabel, labels_of
from tutti.simulate.program import Kind, Program, Track
from tutti.simulate.result import SimulationResult

Event = dict[str, object]
_MICRO = 1e6


def write_trace(
    path: Path, result: SimulationResult, labels: tuple[ClassLabel, ...] | None = None
) -> None:
    """Write the trace as a whole or not at all."""
    write_text(path, trace_text(result, labels))


def trace_text(result: SimulationResult, labels: tuple[ClassLabel, ...] | None = None) -> str:
    """Return the trace as JSON, an event per line."""
    labels = labels_of(result.program.schedule) if labels is None else labels
    write = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
    lines = ",\n".join(write(event) for event in trace_events(result, labels))
    about = json.dumps({"step_seconds": result.step_seconds})
    return f'{{"displayTimeUnit":"ms","otherData":{about},"traceEvents":[\n{lines}\n]}}\n'


def trace_events(result: SimulationResult, labels: tuple[ClassLabel, ...]) -> Iterator[Event]:
    """Yield names of processes and threads, then slices, then arrows."""
    program = result.program
    threads = _threads(program)
    for index, label in enumerate(labels):
        name = " · ".join(filter(None, (label.name, label.chip)))
        yield {"ph": "M", "pid": index, "name": "process_name", "args": {"name": name}}
        sort = {"sort_index": index}
        yield {"ph": "M", "pid": index, "name": "process_sort_index", "args": sort}
        for thread, title in sorted({threads[c] for c in _own_channels(program, index)}):
            about = {"ph": "M", "pid": index, "tid": thread}
            yield {**about, "name": "thread_name", "args": {"name": title}}
            yield {**about, "name": "thread_sort_index", "args": {"sort_index": thread}}
    yield from _slices(result, threads)
    yield from _arrows(result, threads)


def _own_channels(program: Program, index: int) -> list[int]:
    return [int(c) for c in np.unique(program.channel[program.span(index)])]


def _threads(program: Program) -> dict[int, tuple[int, str]]:
    """Return thread id and name of each channel; tracks of the network may have several."""
    found: dict[int, tuple[int, str]] = {}
    _, samples = np.unique(program.channel, return_index=True)
    for i in samples.tolist():
        track = Track(int(program.track[i]))
        thread, title = int(track), track.label
        if track is Track.COLLECTIVE and program.inside[i]:
            thread, title = len(Track), f"{title} in the pipeline"
        elif track in (Track.SEND, Track.RECEIVE):
            what, unit = int(program.what[i]), int(program.first[i])
            thread = len(Track) + 1 + (unit * len(WHATS) + what) * 2 + (track is Track.RECEIVE)
            title = f"{title} {WHATS[what].value} at unit {unit}"
        found[int(program.channel[i])] = (thread, title)
    return found


def _slices(result: SimulationResult, threads: dict[int, tuple[int, str]]) -> Iterator[Event]:
    program = result.program
    names = [op.value for op in OPS]
    tracks = [track.label for track in Track]
    critical = set(result.critical_indices)
    columns = (
        np.repeat(np.arange(result.num_classes), np.diff(program.offsets)),
        program.op,
        program.track,
        program.channel,
        result.start * _MICRO,
        (result.end - result.start) * _MICRO,
    )
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for i, (arguments, row) in enumerate(zip(_arguments(program), rows, strict=True)):
        owner, op, track, channel, start, duration = row
        if i in critical:
            arguments["critical"] = True
        yield {
            "ph": "X",
            "pid": owner,
            "tid": threads[channel][0],
            "ts": start,
            "dur": duration,
            "name": names[op],
            "cat": tracks[track],
            "args": arguments,
        }


def _arguments(program: Program) -> Iterator[Event]:
    columns = (program.micro_batch, program.first, program.stop, program.what)
    for micro_batch, first, stop, what in zip(*(c.tolist() for c in columns), strict=True):
        found: Event = {}
        if micro_batch != NO_MICRO_BATCH:
            found["micro_batch"] = micro_batch
        if stop > first:
            found["units"] = f"{first}-{stop - 1}"
        if WHATS[what]:
            found["what"] = WHATS[what].value
        yield found


def _arrows(result: SimulationResult, threads: dict[int, tuple[int, str]]) -> Iterator[Event]:
    """Yield a flow from the last Send of a boundary tensor to each of its Receives."""
    program = result.program
    last: dict[int, int] = {}
    for i in np.flatnonzero(program.kind == Kind.SEND).tolist():
        meeting = int(program.meeting[i])
        if meeting not in last or result.end[i] > result.end[last[meeting]]:
            last[meeting] = i
    for number, i in enumerate(np.flatnonzero(program.kind == Kind.RECEIVE).tolist()):
        source = last[int(program.meeting[i])]
        for phase, at in (("s", source), ("f", i)):
            event: Event = {
                "ph": phase,
                "id": number,
                "pid": program.class_of(at),
                "tid": threads[int(program.channel[at])][0],
                "ts": float(result.start[at]) * _MICRO,
                "name": WHATS[int(program.what[at])].value,
                "cat": "boundary",
            }
            yield {**event, "bp": "e"} if phase == "f" else event
