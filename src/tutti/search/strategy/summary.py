"""A plan's strategy in one line."""

from __future__ import annotations

from tutti.plan.plan import Pipeline, Plan, Stage
from tutti.units import many


def summary_of(plan: Plan) -> str:
    """Return what a plan does, such as "a800 2×(tp 1, 4 stages) → v100 tp 2 · 1f1b · shard 1"."""
    level = max((rule.shard_level for rule in plan.synchronisation), default=0)
    pipelines = " + ".join(_pipeline(pipeline) for pipeline in plan.pipelines)
    shard = f" · shard {level}" if level else ""
    return f"{pipelines} · {plan.job.schedule.value}{shard}"


def _pipeline(pipeline: Pipeline) -> str:
    runs: list[tuple[str, int]] = []
    for stage in pipeline.stages:
        text = _stage(stage)
        if runs and runs[-1][0] == text:
            runs[-1] = (text, runs[-1][1] + 1)
        else:
            runs.append((text, 1))
    parts = [f"{count} stages of {text}" if count > 1 else text for text, count in runs]
    return (
        f"{' → '.join(parts)} ({pipeline.micro_batches} × {many(pipeline.micro_batch, 'sequence')})"
    )


def _stage(stage: Stage) -> str:
    return " & ".join(
        f"{r.count} × {r.chips.pools[0]}"
        f"{f' tp{r.tp}' if r.tp > 1 else ''}{f' cp{r.cp}' if r.cp > 1 else ''}"
        + (f" ep{stage.experts[0].chips}" if stage.experts else "")
        for r in stage.replicas
    )
