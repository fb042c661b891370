"""A run as its folder tells it: the figures that `tutti train` wrote. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tutti.errors import InputError
from tutti.files import read_file, require_folder
from tutti.observe.folder import METRICS, PLAN_FILE, RUN_FILE
from tutti.observe.sinks import figure_lines
from tutti.plan.files import load_plan
from tutti.report.training import PoolFigures, RunFigures, StepFigures

_PARTS = {
    "compute": "compute_s",
    "communication": "communication_s",
    "bubble": "bubble_s",
    "copies": "copy_s",
    "data": "data_s",
    "other": "other_s",
}


def read_run(folder: Path, name: str = "") -> RunFigures:
    """Return a run; `name` is what tables call it (default: that of its folder)."""
    require_folder(folder)
    path = folder / METRICS
    if not path.is_file():
        raise InputError(f"{folder}: has no {METRICS}; name the output folder of `tutti train`")
    lines = list(_lines(path))
    steps = [line for line in lines if "loss" in line]
    if not steps:
        raise InputError(f"{path}: has no step; let the run do one")
    plan = load_plan(folder / PLAN_FILE)
    config = read_file(folder / RUN_FILE)
    cluster = plan.cluster.cluster
    job: Any = config.get("job") if isinstance(config, Mapping) else None
    pools = [dict(line.get("pools") or {}) for line in steps]
    overruns = [float(figures["overrun"]) for own in pools for figures in own.values()]
    return RunFigures(
        name=name or folder.resolve().name,
        model=Path(plan.model.name).name,
        cluster=plan.cluster.name,
        num_ranks=plan.num_ranks,
        uniform=isinstance(job, Mapping) and bool(job.get("uniform")),
        emulated=cluster is not None and any(p.chip.emulated for p in cluster.pools),
        overrun=max(overruns, default=0.0),
        predicted_s=steps[-1].get("predicted_s"),
        steps=[_step(line) for line in steps],
        validation=[(line["step"], line["validation_loss"]) for line in lines if _held_out(line)],
        pools=_pools(pools[1:] or pools),
    )


def _lines(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the objects of a file; its last lines may be cut off where a run was killed."""
    lines = figure_lines(path)
    for number, line in enumerate(lines, 1):
        try:
            line_object = json.loads(line)
        except ValueError:
            if number == len(lines):
                return
            raise InputError(f"{path} line {number}: is no JSON; delete the line") from None
        if isinstance(line_object, dict):
            yield line_object


def _held_out(line: Mapping[str, Any]) -> bool:
    return "validation_loss" in line


def _step(line: Mapping[str, Any]) -> StepFigures:
    return StepFigures(
        step=int(line["step"]),
        loss=float(line["loss"]),
        seconds=float(line["seconds"]),
        tokens_per_s=float(line["tokens_per_s"]),
        mfu=float(line["mfu"]),
        reward=(line.get("sampled") or {}).get("reward"),
        margin=line.get("margin"),
    )


def _pools(steps: Sequence[Mapping[str, Any]]) -> list[PoolFigures]:
    """Return the mean of each pool over steps."""
    means = []
    for pool in dict.fromkeys(name for own in steps for name in own):
        rows = [own[pool] for own in steps if pool in own]
        means.append(
            PoolFigures(
                pool=pool,
                ranks=int(rows[-1]["ranks"]),
                parts={
                    part: sum(float(row[key]) for row in rows) / len(rows)
                    for part, key in _PARTS.items()
                },
                peak_bytes=max(float(row["peak_bytes"]) for row in rows),
            )
        )
    return means
