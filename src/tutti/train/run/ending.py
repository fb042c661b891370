"""How a run ends: the last save, the export, its result. What cannot be written is an error."""

from __future__ import annotations

import os
import shutil
import signal
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tutti.errors import TuttiError
from tutti.huggingface.workspace import partial_of
from tutti.observe.folder import ADAPTER, AVERAGED, CHECKPOINTS, EXPORT
from tutti.train.checkpoint import Checkpointer, Progress, export_hf
from tutti.train.checkpoint.coordinator import Coordinator
from tutti.train.checkpoint.folders import find_best, folder_name, newest_first
from tutti.train.engine.engine import Engine
from tutti.train.run.rank_context import RankContext
from tutti.train.run.weights import model_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What a run has come to, step by step."""

    first_step: int
    losses: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)  # (step, loss)
    seconds: list[float] = field(default_factory=list)

    def add(self, loss: float, seconds: float) -> None:
        """Take a step."""
        self.losses.append(loss)
        self.seconds.append(seconds)

    @property
    def steady_s(self) -> float:
        """The seconds of a step: median, without the first."""
        return statistics.median(self.seconds[1:] or self.seconds) if self.seconds else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A run whose last step is made, on one rank."""

    context: RankContext
    engine: Engine
    checkpointer: Checkpointer
    saving: Coordinator
    progress: Progress
    history: History
    stopped_by: int  # the signal that asked this rank to stop, 0 if none did
    early: bool = False  # evaluations became no better: nothing is left to do
    predicted_s: float
    mfu: Callable[[float], float]  # of a step that takes so many seconds

    @property
    def done(self) -> bool:
        """Whether all steps were made."""
        return self.early or self.progress.step >= self.context.config.steps


def finish(run: Ended) -> dict[str, Any]:
    """Save and export what is due; return what the run came to, or raise on every rank."""
    config, history = run.context.config, run.history
    saves = config.checkpoints
    exported: dict[str, str] = {}
    if history.losses and (saves.final or not run.done):
        run.checkpointer.save(run.engine, run.progress)
    problem = _last_save(run.checkpointer)
    exports = run.done and saves.final and saves.huggingface
    if run.context.rank == 0 and exports and not problem:
        exported, problem = _export(run.context, run.progress.step, again=bool(history.losses))
    problem = run.saving.broadcast((problem,))[0]
    if problem:
        raise TuttiError(problem)
    steady = history.steady_s
    kept = newest_first(config.folder / CHECKPOINTS)
    best = find_best(kept) if saves.keep_best else None
    return {
        "steps": run.progress.step,
        "first_step": history.first_step,
        "losses": history.losses,
        "validation": history.validation,
        "seconds_per_step": steady,
        "tokens_per_s": run.context.plan.job.tokens / steady if steady else 0.0,
        "mfu": run.mfu(steady) if steady else 0.0,
        "predicted_s": run.predicted_s,
        "checkpoint": str(kept[0][0]) if kept else None,
        "best": None if best is None else str(best),
        "huggingface": exported.get(EXPORT),
        "adapter": exported.get(ADAPTER),
        "early": run.early,
        "stopped_by": 0 if run.done else run.stopped_by or int(signal.SIGTERM),
    }


def _last_save(checkpointer: Checkpointer) -> str:
    """Return why the run's last save failed; empty if it did not, or there was none."""
    checkpointer.wait()
    tried = checkpointer.history[-1:]
    if not tried or not tried[0].problem:
        return ""
    return f"{checkpointer.failure(tried[0])}; mend it and go on with --resume"


def _export(context: RankContext, step: int, *, again: bool) -> tuple[dict[str, str], str]:
    """Write the last step as folders that other libraries load, over older ones; on rank 0.

    Returns the folders, and the problem if there is one. Unless `again`, those that are there stay.
    """
    base = model_folder(context.config.model)
    if base is None:
        text = f"no Hugging Face folder: '{context.config.model}' is a name, and has no config.json"
        context.warn(text)
        return {}, ""
    checkpoint = context.config.folder / CHECKPOINTS / folder_name(step)
    written: dict[str, str] = {}
    for name, write in _writers(context, checkpoint, base).items():
        target = context.config.folder / name
        if not again and (target.exists() or not checkpoint.is_dir()):
            written |= {name: str(target)} if target.exists() else {}
            continue
        context.say(f"writing {target}")
        fresh = target.with_name(f".{name}.new")
        _remove_half(fresh)
        try:
            write(fresh)
            shutil.rmtree(target, ignore_errors=True)
            os.replace(fresh, target)
        except (TuttiError, OSError) as error:
            _remove_half(fresh)
            return {}, (
                f"no {'PEFT' if name == ADAPTER else 'Hugging Face'} folder could be written: "
                f"{error}; the weights are in {checkpoint}, --resume writes it again"
            )
        written[name] = str(target)
    return written, ""


def _writers(
    context: RankContext, checkpoint: Path, base: Path
) -> dict[str, Callable[[Path], object]]:
    """Return what writes each folder of the trained model, by its name."""
    tuning = context.spec.tuning
    if tuning is None or tuning.adapter is None:
        whole: dict[str, Callable[[Path], object]] = {
            EXPORT: lambda fresh: export_hf(checkpoint, fresh)
        }
        if context.plan.job.average:
            whole[AVERAGED] = lambda fresh: export_hf(checkpoint, fresh, averaged=True)
        return whole
    from tutti.train.checkpoint.adapters import export_adapter, export_merged

    writers: dict[str, Callable[[Path], object]] = {
        ADAPTER: lambda fresh: export_adapter(checkpoint, fresh, base=base)
    }
    if context.config.checkpoints.merged:
        writers[EXPORT] = lambda fresh: export_merged(checkpoint, fresh, base=base)
    return writers


def _remove_half(fresh: Path) -> None:
    for path in (fresh, partial_of(fresh)):
        shutil.rmtree(path, ignore_errors=True)
