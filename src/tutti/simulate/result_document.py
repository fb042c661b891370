"""A simulated step as plain JSON values."""

from __future__ import annotations

from tutti.simulate.labels import ClassLabel, labels_of
from tutti.simulate.result import IDLE_REASONS, SimulationResult

MOST_PATH_ENTRIES = 2000  # the document holds no more of a longer critical path


def result_document(
    result: SimulationResult, labels: tuple[ClassLabel, ...] | None = None
) -> dict[str, object]:
    """Return step time, shares, each class, the critical path and the warnings."""
    labels = labels_of(result.program.schedule) if labels is None else labels
    path = result.critical_path
    return {
        "step_seconds": result.step_seconds,
        "num_instructions": result.program.size,
        "idle_share": result.idle_share,
        "lost_shares": {reason.value: result.share(reason) for reason in IDLE_REASONS},
        "classes": [_class_document(result, i, label) for i, label in enumerate(labels)],
        "critical_seconds": result.critical_seconds,
        "critical_path_length": len(path),
        "critical_path": [
            {
                "class": entry.rank_class,
                "instruction": entry.instruction,
                "text": str(result.instruction(entry)),
                "start_s": entry.start,
                "end_s": entry.end,
            }
            for entry in path[:MOST_PATH_ENTRIES]
        ],
        "warnings": result.warnings(labels),
    }


def _class_document(result: SimulationResult, index: int, label: ClassLabel) -> dict[str, object]:
    own = result.classes[index]
    rank_class = result.program.schedule.classes[index]
    return {
        "name": label.name,
        "pipeline": rank_class.pipeline,
        "stage": rank_class.stage,
        "replica": rank_class.replica,
        "num_ranks": rank_class.num_ranks,
        "pool": label.pool,
        "chip": label.chip,
        "compute_s": dict(own.compute),
        "idle_s": {reason.value: seconds for reason, seconds in own.idle.items()},
        "busy_s": {track.label: seconds for track, seconds in own.busy_seconds.items()},
        "idle_share": own.idle_share,
        "bubble_share": own.bubble_share,
        "static_bytes": own.static_bytes,
        "peak_bytes": own.peak_bytes if label.peak_bytes is None else label.peak_bytes,
        "peak_time_s": result.memory(index).peak_time,
        "limit_bytes": label.limit_bytes,
    }
