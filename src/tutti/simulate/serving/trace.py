"""A simulated deployment as a Chrome trace: a process per engine, a row per lane."""

from __future__ import annotations

import json
from pathlib import Path

from tutti.files import write_text
from tutti.simulate.serving.result import ServingResult

MOST_STEPS = 50_000


def write_serving_trace(path: Path, result: ServingResult) -> None:
    """Write the steps of all engines that were simulated, and the queue."""
    events: list[dict[str, object]] = []
    for number in sorted({step.engine for step in result.steps}):
        name = {"name": f"engine {number}"}
        events.append({"ph": "M", "name": "process_name", "pid": number, "args": name})
    for step in result.steps:
        kind = "decode" if step.tokens == step.rows else "prefill" if not step.rows else "both"
        events.append({
            "ph": "X", "name": kind, "pid": step.engine, "tid": step.lane,
            "ts": 1e6 * step.begins_s, "dur": 1e6 * (step.ends_s - step.begins_s),
            "args": {"tokens": step.tokens, "decodes": step.rows},
        })  # fmt: skip
    for time, waiting, running in zip(*(column.tolist() for column in result.queue), strict=True):
        counts = {"waiting": waiting, "running": running}
        events.append({"ph": "C", "name": "requests", "pid": 0, "ts": 1e6 * time, "args": counts})
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    write_text(path, f'{{"traceEvents":[\n{lines}\n]}}\n')
