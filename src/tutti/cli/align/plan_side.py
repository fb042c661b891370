"""A training run under a plan as a side of `tutti align`: some steps on processes of this machine.

It stands here because it joins two rooms that do not know each other: `train` and `huggingface`.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tutti.cli.shared.torch_needed import require_torch
from tutti.errors import InputError
from tutti.plan.files import load_plan

if TYPE_CHECKING:
    from tutti.train.run.config import TrainConfig

PREFIX = "plan:"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTask:
    """What a training run is asked for besides its plan; the same for both sides."""

    steps: int
    model: str | None = None  # a folder or a name; none: what the plan names
    data: tuple[str, ...] = ()  # files; none: synthetic
    config: Path | None = None  # a training file that the rest is taken from
    seed: int = 0


def plan_of_side(side: str) -> Path | None:
    """Return the plan file of a side that is written as "plan:FILE"."""
    return Path(side.removeprefix(PREFIX)) if side.startswith(PREFIX) else None


def check_alike(paths: tuple[Path, Path]) -> None:
    """Refuse two plans that do not train on the same tokens, before anything runs."""
    a, b = (load_plan(path).job for path in paths)
    for name in ("global_batch", "sequence_length", "optimizer"):
        mine, theirs = getattr(a, name), getattr(b, name)
        if mine != theirs:
            raise InputError(
                f"{paths[1]}: {name} is {theirs}, of {paths[0]} it is {mine}; only plans of the "
                "same job compute the same"
            )


def run_plan(path: Path, task: PlanTask, target: Path) -> None:
    """Train under a plan and write the dump; the run's own files are kept where it fails."""
    require_torch("align")
    from tutti.huggingface.workspace import require_free
    from tutti.train.run.planning import prepare
    from tutti.train.run.step_dump import write_step_dump
    from tutti.train.run.trainer import run_local

    require_free(target, resume=True)
    scratch = Path(tempfile.mkdtemp(prefix="tutti-align-"))
    try:
        job = prepare(_config(path, task, scratch))
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    run_local(job).require_finished()
    write_step_dump(Path(job.config.measure.tensors), target, side=f"{PREFIX}{path.name}")
    shutil.rmtree(scratch)


def _config(path: Path, task: PlanTask, scratch: Path) -> TrainConfig:
    """Return the training job of a side: nothing but its steps."""
    from tutti.cli.train import asked
    from tutti.train.run.config import CheckpointConfig, MeasureConfig, ValidationConfig

    seeds = [] if task.config is not None else [f"seed={task.seed}", f"data.seed={task.seed}"]
    config = asked(
        task.config,
        plan=path,
        model=task.model,
        data=list(task.data) or None,
        steps=task.steps,
        output=str(scratch / "run"),
        changes=seeds,
    )
    return replace(
        config,
        checkpoints=CheckpointConfig(final=False, huggingface=False),
        validation=ValidationConfig(),
        measure=MeasureConfig(tensors=str(scratch / "tensors")),
    )
