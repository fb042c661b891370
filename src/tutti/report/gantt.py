"""The Gantt chart of a step: every instruction of every class of ranks, zoomable.

Python puts the instructions into rows (class × track) in order of time; the script draws whatever
is visible, blending instructions that are narrower than a pixel.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

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


def gantt_section(
    result: SimulationResult,
    labels: tuple[ClassLabel, ...],
    arrays: Pack,
    *,
    name: str = "gantt",
    shown: Sequence[int] | None = None,
) -> Section:
    """Return the chart of all classes of ranks, or of those `shown`; arrays go into `arrays`."""
    program = result.program
    chosen = range(result.num_classes) if shown is None else sorted(set(shown))
    drawn = np.full(result.num_classes, -1)
    drawn[list(chosen)] = np.arange(len(chosen))
    owner = np.repeat(drawn, np.diff(program.offsets))
    row = owner * len(Track) + program.track
    kept = np.flatnonzero(owner >= 0)
    order = kept[np.lexsort((result.start[kept], row[kept]))]
    rows, starts = np.unique(row[order], return_index=True)
    template, texts = _templates(program, order)
    place = np.full(program.size, -1)
    place[order] = np.arange(len(order))
    path = place[np.array(result.critical_indices, dtype=int)]
    step = result.step_seconds
    data = {
        "step": step,
        "classes": [
            [labels[i].name, labels[i].chip or labels[i].pool, labels[i].detail] for i in chosen
        ],
        "tracks": [track.label for track in Track],
        "rows": [[int(r) // len(Track), int(r) % len(Track), int(s)]
                 for r, s in zip(rows, starts, strict=True)],
        "kinds": [[op.value, COLORS[op]] for op in OPS],
        "templates": texts,
        "start": arrays.add(f"{name}.start", ticks(result.start[order], step), "u4"),
        "length": arrays.add(
            f"{name}.length", ticks((result.end - result.start)[order], step), "u4"
        ),
        "template": arrays.add(f"{name}.template", template),
        "micro": arrays.add(f"{name}.micro", program.micro_batch[order] + 1),
        "path": arrays.add(f"{name}.path", path[path >= 0]),
    }  # fmt: skip
    return Section(
        id=name,
        heading="Timeline",
        intro="One row per class of equal ranks: what each computes, sends and receives, and when.",
        body=_CONTROLS,
        scripts=("gantt.js",),
        data={"part": "gantt", **data},
    )


def _templates(
    program: Program, order: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], list[list[object]]]:
    """Return what instructions have in common but for time and micro-batch, and its texts."""
    columns = [c[order] for c in (program.op, program.first, program.stop, program.what)]
    code = np.zeros(len(order), dtype=np.int64)
    for column in columns:  # one number per instruction sorts faster than four
        code = code * (int(column.max(initial=0)) + 1) + column
    _, where, found = np.unique(code, return_index=True, return_inverse=True)
    texts = [_text(*(int(column[i]) for column in columns)) for i in where]
    return found.reshape(-1), texts


def _text(op: int, first: int, stop: int, what: int) -> list[object]:
    words = [OPS[op].value]
    if WHATS[what]:
        words.append(WHATS[what].value)
    if OPS[op] in (Op.SEND, Op.RECEIVE):
        words.append(f"at unit {first}")
    elif stop > first:
        words.append(f"unit {first}" if stop - first == 1 else f"units {first}–{stop - 1}")
    return [op, " ".join(words)]
