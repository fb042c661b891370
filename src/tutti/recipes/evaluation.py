"""Tasks asked of a model folder by the serving engine: what `tutti evaluate` does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tutti.errors import InputError
from tutti.serve.engine import Engine
from tutti.serve.parameters import SamplingParameters
from tutti.train.evaluation.config import TaskConfig
from tutti.train.evaluation.tasks import EvaluationTask, Scored, open_task

Progress = Callable[[str, int, int], None]
_AT_A_TIME = 256  # requests: so that progress is seen, and prompts' figures are let go


def evaluate_folder(
    folder: Path | str,
    tasks: Sequence[TaskConfig],
    *,
    progress: Progress = lambda _task, _done, _whole: None,
    adapter: Path | str | None = None,
    **options: Any,
) -> dict[str, dict[str, float]]:
    """Return the figures of each task; options are those of `tutti.serve.Engine`."""
    if adapter is not None:
        options["adapters"] = {"adapter": adapter}
    engine = Engine.from_pretrained(folder, **options)
    if engine.tokenizer is None:
        raise InputError(f"{folder}: has no tokenizer, and tasks are text; name one")
    longest = engine.worker.settings.max_length - 1
    opened = [open_task(task, engine.tokenizer, longest=longest) for task in tasks]
    named = "" if adapter is None else "adapter"
    return {
        task.name: task.figures(folder_logps(engine, task, progress, adapter=named))
        for task in opened
    }


def folder_logps(
    engine: Engine, task: EvaluationTask, progress: Progress, *, adapter: str = ""
) -> list[float]:
    """Return each item's log-probability: that of its prompt's last tokens."""
    parameters = SamplingParameters(max_tokens=1, prompt_logprobs=0, adapter=adapter)
    logps: list[float] = []
    for start in range(0, len(task.items), _AT_A_TIME):
        some = task.items[start : start + _AT_A_TIME]
        done = engine.generate([list(item.tokens) for item in some], parameters)
        logps += [
            _sum(item, one.prompt_logprobs or ()) for item, one in zip(some, done, strict=True)
        ]
        progress(task.name, len(logps), len(task.items))
    return logps


def _sum(item: Scored, logprobs: Sequence[Any]) -> float:
    return float(sum(entry.logprob for entry in logprobs[item.first :]))
