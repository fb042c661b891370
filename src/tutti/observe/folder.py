"""What lies where in the output folder of a run."""

from __future__ import annotations

METRICS = "metrics.jsonl"  # a line per step
RUN_FILE = "run.json"  # the job as it was asked for
PLAN_FILE = "plan.json"


def trace_name(step: int) -> str:
    """Return the file of a step's trace."""
    return f"trace-step-{step}.json"
