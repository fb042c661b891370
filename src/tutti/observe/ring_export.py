"""Rings in the forms that others read: a Chrome trace, and PyTorch's flight-recorder form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tutti.observe.ring import Kind, RingReading


class Span(NamedTuple):
    """An instruction or a wait for one; `end_ns` is None where it is not over."""

    instruction: int
    step: int
    waits: bool
    begin_ns: int
    end_ns: int | None


_OPENS = {Kind.START: Kind.ISSUED, Kind.WAIT: Kind.DONE}
_CLOSES = {end: begin for begin, end in _OPENS.items()}


def spans(ring: RingReading) -> Iterator[Span]:
    """Yield what a ring's events are the begin and end of, as they end; open ones last."""
    open_: dict[tuple[Kind, int], tuple[int, int]] = {}
    for event in ring.events:
        if event.kind in _OPENS:
            open_[event.kind, event.instruction] = (event.time_ns, event.step)
        elif begin := _CLOSES.get(event.kind):
            since = open_.pop((begin, event.instruction), None)
            if since is not None:
                yield Span(
                    event.instruction, event.step, begin is Kind.WAIT, since[0], event.time_ns
                )
    for (kind, instruction), (begin_ns, step) in open_.items():
        yield Span(instruction, step, kind is Kind.WAIT, begin_ns, None)


def chrome_trace(rings: Sequence[RingReading]) -> dict[str, Any]:
    """Return rings as a Chrome trace: a process per rank, a thread per lane and one for waits."""
    trace_events: list[dict[str, Any]] = []
    for ring in rings:
        last = ring.events[-1].time_ns if ring.events else 0
        trace_events.append({"ph": "M", "name": "process_name", "pid": ring.rank,
                      "args": {"name": f"rank {ring.rank} · {ring.host}"}})  # fmt: skip
        for span in spans(ring):
            listed = ring.instructions[span.instruction]
            end = last if span.end_ns is None else span.end_ns
            trace_events.append({
                "ph": "X", "pid": ring.rank, "tid": "waits" if span.waits else listed.lane,
                "name": listed.words + (" (not over)" if span.end_ns is None else ""),
                "ts": (span.begin_ns + ring.clock_ns) / 1e3, "dur": (end - span.begin_ns) / 1e3,
                "args": {"step": span.step, "bytes": listed.bytes},
            })  # fmt: skip
    return {"traceEvents": trace_events, "displayTimeUnit": "ms"}


def flight_record(ring: RingReading) -> dict[str, Any]:
    """Return a ring's messages and collectives in PyTorch's flight-recorder form."""
    states: dict[tuple[int, int], dict[str, Any]] = {}
    for event in ring.events:
        if event.instruction < 0 or not ring.instructions[event.instruction].meets:
            continue
        listed = ring.instructions[event.instruction]
        key = (event.step, event.instruction)
        entry = states.setdefault(key, {
            "record_id": len(states), "pg_id": 0, "process_group": (listed.meets, listed.words),
            "collective_seq_id": event.step, "p2p_seq_id": event.step, "op_id": event.step,
            "profiling_name": f"tutti:{listed.words.split()[0]}", "frames": [],
            "time_created_ns": event.time_ns + ring.clock_ns,
            "input_sizes": [[int(listed.bytes)]], "input_dtypes": ["Byte"],
            "output_sizes": [[int(listed.bytes)]], "output_dtypes": ["Byte"],
            "state": "scheduled", "time_discovered_started_ns": None,
            "time_discovered_completed_ns": None, "retired": False, "timeout_ms": 0,
            "is_p2p": listed.words.startswith(("Send", "Receive")),
        })  # fmt: skip
        moment = event.time_ns + ring.clock_ns
        if event.kind is Kind.START:
            entry |= {"state": "started", "time_discovered_started_ns": moment}
        elif event.kind is Kind.DONE:
            entry |= {"state": "completed", "time_discovered_completed_ns": moment, "retired": True}
    return {"version": "2.10", "rank": ring.rank, "pg_config": {}, "pg_status": {},
            "entries": list(states.values())}  # fmt: skip
