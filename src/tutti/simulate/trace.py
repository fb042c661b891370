"""A simulated step as a Chrome trace: one process per class of ranks.

The form is that of `chrome`, in which real steps are written, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tutti.files import write_text
from tutti.simulate.chrome import TraceArrow, TraceRow, chrome_text
from tutti.simulate.labels import ClassLabel, labels_of
from tutti.simulate.program import Kind
from tutti.simulate.result import SimulationResult


def write_trace(
    path: Path, result: SimulationResult, labels: tuple[ClassLabel, ...] | None = None
) -> None:
    """Write the trace as a whole or not at all."""
    write_text(path, trace_text(result, labels))


def trace_text(result: SimulationResult, labels: tuple[ClassLabel, ...] | None = None) -> str:
    """Return the trace as JSON, an event per line."""
    labels = labels_of(result.program.schedule) if labels is None else labels
    about = {"step_seconds": result.step_seconds}
    return chrome_text(result.program, trace_rows(result, labels), _arrows(result), about)


def trace_rows(result: SimulationResult, labels: tuple[ClassLabel, ...]) -> list[TraceRow]:
    """Return the step of each class of ranks."""
    critical: list[set[int]] = [set() for _ in labels]
    for flat in result.critical_indices:
        index, position = result.program.place(flat)
        critical[index].add(position)
    rows = []
    for index, label in enumerate(labels):
        start, end = result.timeline(index)
        rows.append(
            TraceRow(
                name=" · ".join(filter(None, (label.name, label.chip))),
                rank_class=index,
                start=start,
                end=end,
                critical=frozenset(critical[index]),
            )
        )
    return rows


def _arrows(result: SimulationResult) -> Iterator[TraceArrow]:
    """Yield a flow from the last Send of a boundary tensor to each of its Receives."""
    program = result.program
    last: dict[int, int] = {}
    for i in np.flatnonzero(program.kind == Kind.SEND).tolist():
        meeting = int(program.meeting[i])
        if meeting not in last or result.end[i] > result.end[last[meeting]]:
            last[meeting] = i
    for i in np.flatnonzero(program.kind == Kind.RECEIVE).tolist():
        source = last[int(program.meeting[i])]
        yield TraceArrow(
            source=(*program.place(source), float(result.start[source])),
            target=(*program.place(i), float(result.start[i])),
        )
