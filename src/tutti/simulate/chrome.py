"""A step as a Chrome trace, which Perfetto (ui.perfetto.dev) and Chrome open: simulated or real.

One process per row (a class of ranks, or a rank), one thread per lane or channel, a slice per
instruction in the order of the list, an arrow from each Send to its Receives. Times are
microseconds. What is drawn comes from `trace` (simulated) and `measured` (real).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tutti.cost.plan.simulator_inputs import FloatArray
from tutti.schedule.instruction import NO_MICRO_BATCH
from tutti.schedule.listing import OPS, WHATS
from tutti.simulate.program import Program, Track

Event = dict[str, object]
_MICRO = 1e6
_BESIDE = 8  # sub-threads of a channel that keep their order when sorted


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TraceRow:
    """One process of a trace; arrays run over the instructions of its class, in list order."""

    name: str
    rank_class: int
    start: FloatArray
    end: FloatArray
    critical: frozenset[int] = frozenset()  # positions in the list
    waited: FloatArray | None = None  # seconds that compute was kept waiting; of a real step


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceArrow:
    """What one instruction of a row gives to one of another; each end is (row, position, time)."""

    source: tuple[int, int, float]
    target: tuple[int, int, float]


def chrome_text(
    program: Program,
    rows: Sequence[TraceRow],
    arrows: Iterable[TraceArrow],
    about: Mapping[str, object],
) -> str:
    """Return the trace as JSON, an event per line."""
    write = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
    lines = ",\n".join(write(event) for event in _events(program, rows, arrows))
    head = json.dumps(about)
    return f'{{"displayTimeUnit":"ms","otherData":{head},"traceEvents":[\n{lines}\n]}}\n'


def _events(
    program: Program, rows: Sequence[TraceRow], arrows: Iterable[TraceArrow]
) -> Iterator[Event]:
    """Yield names of processes and threads, then slices, then arrows."""
    channels = _Channels(program)
    threads = [channels.of_row(row) for row in rows]
    for index, (row, own) in enumerate(zip(rows, threads, strict=True)):
        yield {"ph": "M", "pid": index, "name": "process_name", "args": {"name": row.name}}
        sort = {"sort_index": index}
        yield {"ph": "M", "pid": index, "name": "process_sort_index", "args": sort}
        for thread, (place, title) in sorted(channels.named(row, own).items()):
            about = {"ph": "M", "pid": index, "tid": thread}
            yield {**about, "name": "thread_name", "args": {"name": title}}
            yield {**about, "name": "thread_sort_index", "args": {"sort_index": place}}
    for index, (row, own) in enumerate(zip(rows, threads, strict=True)):
        yield from _slices(program, index, row, own)
    for number, arrow in enumerate(arrows):
        for phase, (row_index, position, at) in (("s", arrow.source), ("f", arrow.target)):
            flat = int(program.offsets[rows[row_index].rank_class]) + position
            event: Event = {
                "ph": phase,
                "id": number,
                "pid": row_index,
                "tid": threads[row_index][position],
                "ts": at * _MICRO,
                "name": WHATS[int(program.what[flat])].value,
                "cat": "boundary",
            }
            yield {**event, "bp": "e"} if phase == "f" else event


class _Channels:
    """Thread number and name of each channel of a program."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._base: dict[int, tuple[int, str]] = {}
        _, samples = np.unique(program.channel, return_index=True)
        for i in samples.tolist():
            self._base[int(program.channel[i])] = _thread(program, i)
        self._stride = 1 + max((thread for thread, _ in self._base.values()), default=0)

    def of_row(self, row: TraceRow) -> list[int]:
        """Return the thread of each instruction of a row.

        Slices of one thread must not overlap. In a real step several messages of a channel may be
        under way at once; then each goes to the first thread beside its channel's that is free.
        """
        span = self._program.span(row.rank_class)
        base = [self._base[c][0] for c in self._program.channel[span].tolist()]
        if row.waited is None:  # simulated: channels are first in, first out
            return base
        busy: dict[int, list[float]] = {}
        channels = [0] * len(base)
        for i in np.argsort(row.start, kind="stable").tolist():
            ends = busy.setdefault(base[i], [])
            start, end = float(row.start[i]), float(row.end[i])
            beside = next((k for k, until in enumerate(ends) if until <= start), len(ends))
            ends[beside : beside + 1] = [end]
            channels[i] = base[i] + beside * self._stride
        return channels

    def named(self, row: TraceRow, threads: Sequence[int]) -> dict[int, tuple[int, str]]:
        """Return place and name of the threads that a row has."""
        span = self._program.span(row.rank_class)
        titles = {self._base[int(c)] for c in np.unique(self._program.channel[span])}
        names = {}
        for thread in set(threads):
            beside, base = divmod(thread, self._stride)
            title = next(text for number, text in titles if number == base)
            name = f"{title} ({beside + 1})" if beside else title
            names[thread] = (base * _BESIDE + min(beside, _BESIDE - 1), name)
        return names


def _thread(program: Program, index: int) -> tuple[int, str]:
    """Return thread and name of an instruction's channel; tracks of the network have several."""
    track = Track(int(program.track[index]))
    if track is Track.COLLECTIVE and program.inside[index]:
        return len(Track), f"{track.label} in the pipeline"
    if track in (Track.SEND, Track.RECEIVE):
        what, unit = int(program.what[index]), int(program.first[index])
        thread = len(Track) + 1 + (unit * len(WHATS) + what) * 2 + (track is Track.RECEIVE)
        return thread, f"{track.label} {WHATS[what].value} at unit {unit}"
    return int(track), track.label


def _slices(program: Program, index: int, row: TraceRow, threads: Sequence[int]) -> Iterator[Event]:
    names = [op.value for op in OPS]
    tracks = [track.label for track in Track]
    span = program.span(row.rank_class)
    columns = (
        program.op[span],
        program.track[span],
        row.start * _MICRO,
        (row.end - row.start) * _MICRO,
    )
    rows = zip(*(column.tolist() for column in columns), strict=True)
    waited = None if row.waited is None else row.waited.tolist()
    for i, (arguments, values) in enumerate(zip(_arguments(program, span), rows, strict=True)):
        op, track, start, duration = values
        if i in row.critical:
            arguments["critical"] = True
        if waited is not None and waited[i]:
            arguments["waited_us"] = round(waited[i] * _MICRO, 3)
        yield {
            "ph": "X",
            "pid": index,
            "tid": threads[i],
            "ts": start,
            "dur": duration,
            "name": names[op],
            "cat": tracks[track],
            "args": arguments,
        }


def _arguments(program: Program, span: slice) -> Iterator[Event]:
    columns = (program.micro_batch, program.first, program.stop, program.what)
    rows = zip(*(column[span].tolist() for column in columns), strict=True)
    for micro_batch, first, stop, what in rows:
        arguments: Event = {}
        if micro_batch != NO_MICRO_BATCH:
            arguments["micro_batch"] = micro_batch
        if stop > first:
            arguments["units"] = f"{first}-{stop - 1}"
        if WHATS[what]:
            arguments["what"] = WHATS[what].value
        yield arguments
