"""How a run ends: the last save, the export, its result. What cannot be written is an error."""

from __future__ import annotations

import os
import shutil
import signal
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tutti.errors import TuttiError
from tutti.huggingface.workspace import partial_of
from tutti.observe.folder import CHECKPOINTS, EXPORT
from tutti.train.checkpoint import export_hf
from tutti.train.checkpoint.folders import find_best, folder_name, newest_first
from tutti.train.run.weights import model_folder

if TYPE_CHECKING:
    from tutti.train.run.worker import Worker


def finish(
    worker: Worker,
    first: int,
    losses: list[float],
    validation: list[tuple[int, float]],
    seconds: list[float],
) -> dict[str, Any]:
    """Save and export what is due; return what the run came to, or raise on every rank."""
    worker.measure.finish()
    saves, exported = worker.config.checkpoints, ""
    done = worker.progress.step >= worker.config.steps
    if losses and (saves.final or not done):
        worker.checkpointer.save(worker.engine, worker.progress)
    problem = _last_save(worker)
    if worker.rank == 0 and done and saves.final and saves.huggingface and not problem:
        exported, problem = _export(worker, again=bool(losses))
    problem = worker.saving.broadcast((problem,))[0]
    if problem:
        raise TuttiError(problem)
    steady = statistics.median(seconds[1:] or seconds) if seconds else 0.0
    tokens = worker.plan.job.tokens / steady if steady else 0.0
    kept = newest_first(worker.config.folder / CHECKPOINTS)
    best = find_best(kept) if saves.keep_best else None
    return {
        "steps": worker.progress.step,
        "first_step": first,
        "losses": losses,
        "validation": validation,
        "seconds_per_step": steady,
        "tokens_per_s": tokens,
        "mfu": worker.measure.mfu(steady) if steady else 0.0,
        "predicted_s": worker.predicted.step_seconds,
        "checkpoint": str(kept[0][0]) if kept else None,
        "best": None if best is None else str(best),
        "huggingface": exported or None,
        "stopped_by": 0 if done else worker.stopped_by or int(signal.SIGTERM),
    }


def _last_save(worker: Worker) -> str:
    """Return why the run's last save failed; empty if it did not, or there was none."""
    worker.checkpointer.wait()
    tried = worker.checkpointer.history[-1:]
    if not tried or not tried[0].problem:
        return ""
    return f"{worker.checkpointer.failure(tried[0])}; mend it and go on with --resume"


def _export(worker: Worker, *, again: bool) -> tuple[str, str]:
    """Write the last step as a Hugging Face folder, in place of an older one; on rank 0.

    Returns the folder, and the problem if there is one. Unless `again`, one that is there stays.
    """
    target = worker.config.folder / EXPORT
    if model_folder(worker.config.model) is None:
        text = f"no Hugging Face folder: '{worker.config.model}' is a name, and has no config.json"
        worker.events.send("warning", text=text)
        return "", ""
    checkpoint = worker.config.folder / CHECKPOINTS / folder_name(worker.progress.step)
    if not again and (target.exists() or not checkpoint.is_dir()):
        return str(target) if target.exists() else "", ""
    worker.events.send("say", text=f"writing {target}")
    fresh = target.with_name(f".{EXPORT}.new")
    _remove_half(fresh)
    try:
        export_hf(checkpoint, fresh)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(fresh, target)
    except (TuttiError, OSError) as error:
        _remove_half(fresh)
        return "", (
            f"no Hugging Face folder could be written: {error}; the weights are in {checkpoint}, "
            "--resume writes it again"
        )
    return str(target), ""


def _remove_half(fresh: Path) -> None:
    for path in (fresh, partial_of(fresh)):
        shutil.rmtree(path, ignore_errors=True)
