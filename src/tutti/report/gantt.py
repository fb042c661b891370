"""The Gantt chart of a step: every instruction of every class of ranks, zoomable.

Python puts the instructions into rows (class × track) in order of time; the script draws whatever
is visible, blending instructions that are narrower than a pixel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tutti.cost.plan.simulator_inputs import FloatArray
from tutti.report.binary import Pack, ticks
from tutti.report.page import Section
from tutti.schedule.instruction import Op
from tutti.schedule.listing import OPS, WHATS
from tutti.simulate.labels import ClassLabel
from tutti.simulate.program import Program, Track
from tutti.simulate.result import SimulationResult

# Instruction kinds by the CSS variable that colours them.
COLORS: dict[Op, str] = {
    Op.FORWARD: "forward",
    Op.RECOMPUTE: "recompute",
    Op.BACKWARD_INPUT: "backward-input",
    Op.BACKWARD_WEIGHT: "backward-weight",
    Op.STEP: "step",
    Op.SEND: "send",
    Op.RECEIVE: "receive",
    Op.GATHER_PARAMETERS: "gather",
    Op.REDUCE_GRADIENTS: "reduce",
    Op.SYNC_TIED: "tied",
    Op.CLIP_NORM: "norm",
    Op.FETCH: "fetch",
    Op.OFFLOAD: "offload",
}

_CONTROLS = """
<div class="controls" role="toolbar" aria-label="Chart">
<button type="button" data-act="in" title="Zoom in (+)">+</button>
<button type="button" data-act="out" title="Zoom out (−)">−</button>
<button type="button" data-act="fit" title="Show the whole step (0)">Fit</button>
<label>Colour <select data-act="color"><option value="kind">kind of work</option>
<option value="micro">micro-batch</option></select></label>
<label><input type="checkbox" data-act="lanes"> all lanes</label>
<label><input type="checkbox" data-act="path"> critical path</label>
<span class="hint">drag to move · Ctrl + wheel or pinch to zoom · Shift + drag to select</span>
</div>
<ul class="legend" data-role="legend"></ul>
<div class="gantt" data-role="view"><canvas tabindex="0" role="img"></canvas>
<div data-role="space"></div></div>
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GanttRow:
    """One row (of several tracks) of the chart: what one class of ranks, or one rank, did."""

    label: str
    aside: str = ""
    detail: str = ""  # on hover
    rank_class: int
    start: FloatArray  # over the instructions of the class, in list order, as is `end`
    end: FloatArray
    # over the same, where known: the last seconds of an instruction in which compute waited for it;
    # the rest of it is drawn pale
    waited: FloatArray | None = None


def gantt_section(
    result: SimulationResult,
    labels: tuple[ClassLabel, ...],
    arrays: Pack,
    *,
    name: str = "gantt",
    shown: Sequence[int] | None = None,
) -> Section:
    """Return the chart of all classes of ranks, or of those `shown`; arrays go into `arrays`."""
    chosen = list(range(result.num_classes)) if shown is None else sorted(set(shown))
    rows = [simulated_row(result, labels[index], index) for index in chosen]
    drawn = {index: row for row, index in enumerate(chosen)}
    path = [
        (drawn[index], position)
        for index, position in map(result.program.place, result.critical_indices)
        if index in drawn
    ]
    return timeline_section(
        result.program, rows, result.step_seconds, arrays, name=name, path=path,
        intro="One row per class of equal ranks: what each computes, sends and receives, and when.",
    )  # fmt: skip


def simulated_row(result: SimulationResult, label: ClassLabel, index: int) -> GanttRow:
    """Return the simulated step of a class."""
    start, end = result.timeline(index)
    return GanttRow(
        label=label.name,
        aside=label.chip or label.pool,
        detail=label.detail,
        rank_class=index,
        start=start,
        end=end,
    )


def timeline_section(
    program: Program,
    shown: Sequence[GanttRow],
    step: float,
    arrays: Pack,
    *,
    name: str = "gantt",
    path: Sequence[tuple[int, int]] = (),
    intro: str = "",
) -> Section:
    """Return the chart of some rows; `path` are its critical instructions (row, position)."""
    items = [_items(program, row) for row in shown]
    sizes = [len(item[0]) for item in items]
    offsets = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    which, start, length, pale = (np.concatenate(columns) for columns in zip(*items, strict=True))
    row = np.repeat(np.arange(len(shown)), sizes) * len(Track) + program.track[which]
    order = np.lexsort((start, row))
    rows, starts = np.unique(row[order], return_index=True)
    template, texts = _templates(program, which[order])
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    critical = np.array([offsets[r] + position for r, position in path], dtype=np.int64)
    data = {
        "step": step,
        "classes": [[row.label, row.aside, row.detail] for row in shown],
        "tracks": [track.label for track in Track],
        "rows": [[int(r) // len(Track), int(r) % len(Track), int(s)]
                 for r, s in zip(rows, starts, strict=True)],
        "kinds": [[op.value, COLORS[op]] for op in OPS],
        "templates": texts,
        "start": arrays.add(f"{name}.start", ticks(start[order], step), "u4"),
        "length": arrays.add(f"{name}.length", ticks(length[order], step), "u4"),
        "template": arrays.add(f"{name}.template", template),
        "micro": arrays.add(f"{name}.micro", program.micro_batch[which[order]] + 1),
        "path": arrays.add(f"{name}.path", place[critical]),
        "pale": arrays.add(f"{name}.pale", pale[order] if pale.any() else pale[:0]),
    }  # fmt: skip
    return Section(
        id=name,
        heading="Timeline",
        intro=intro,
        body=_CONTROLS,
        scripts=("gantt.js",),
        data={"part": "gantt", **data},
    )


def _items(
    program: Program, row: GanttRow
) -> tuple[npt.NDArray[np.int64], FloatArray, FloatArray, npt.NDArray[np.int64]]:
    """Return index, start, length and paleness of what a row draws, its instructions first."""
    span = program.span(row.rank_class)
    which, length = np.arange(span.start, span.stop), row.end - row.start
    if row.waited is None:
        return which, row.start, length, np.zeros(len(which), dtype=np.int64)
    beside = program.track[which] != Track.COMPUTE
    full = np.minimum(row.waited, length)
    kept = np.flatnonzero(beside & (full > 0))
    return (
        np.concatenate([which, which[kept]]),
        np.concatenate([row.start, (row.end - full)[kept]]),
        np.concatenate([length, full[kept]]),
        np.concatenate([beside.astype(np.int64), np.zeros(len(kept), dtype=np.int64)]),
    )


def _templates(
    program: Program, order: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], list[list[object]]]:
    """Return what instructions have in common but for time and micro-batch, and its texts."""
    columns = [c[order] for c in (program.op, program.first, program.stop, program.what)]
    code = np.zeros(len(order), dtype=np.int64)
    for column in columns:  # one number per instruction sorts faster than four
        code = code * (int(column.max(initial=0)) + 1) + column
    _, where, templates = np.unique(code, return_index=True, return_inverse=True)
    texts = [_text(*(int(column[i]) for column in columns)) for i in where]
    return templates.reshape(-1), texts


def _text(op: int, first: int, stop: int, what: int) -> list[object]:
    words = [OPS[op].value]
    if WHATS[what]:
        words.append(WHATS[what].value)
    if OPS[op] in (Op.SEND, Op.RECEIVE):
        words.append(f"at unit {first}")
    elif stop > first:
        words.append(f"unit {first}" if stop - first == 1 else f"units {first}–{stop - 1}")
    return [op, " ".join(words)]
