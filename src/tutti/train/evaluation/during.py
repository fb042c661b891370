"""Evaluation during a run: when it is due, what is kept of it, and when it ends the run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tutti import files
from tutti.errors import InputError, hint
from tutti.huggingface.tokenizer import Tokenizer
from tutti.observe.folder import EVALUATIONS
from tutti.train.data.row import check_vocabulary
from tutti.train.evaluation.config import EvaluateConfig
from tutti.train.evaluation.tasks import EvaluationTask, better, open_task, told

Ask = Callable[[EvaluationTask], Mapping[str, float]]
Figures = dict[str, dict[str, float]]


@dataclass(slots=True)
class Evaluations:
    """What a run's evaluations have come to."""

    config: EvaluateConfig
    tasks: list[EvaluationTask]
    best: float | None = None
    worse: int = 0  # evaluations since the best
    last_step: int = -1
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        known = [f"{t.name}/{name}" for t in self.tasks for name in t.figures([0.0] * len(t.items))]
        if self.config.best and self.config.best not in known:
            raise InputError(
                f"evaluate.best: '{self.config.best}' is no figure; {hint(self.config.best, known)}"
            )

    @property
    def figure(self) -> str:
        """The figure that tells checkpoints apart, as TASK/FIGURE."""
        first = self.tasks[0]
        return self.config.best or f"{first.name}/{first.main}"

    @property
    def is_over(self) -> bool:
        """Whether no better one came for as long as was waited."""
        return bool(self.config.patience) and self.worse >= self.config.patience

    def due(self, step: int, last: int) -> bool:
        """Tell whether tasks are taken after a step."""
        every = self.config.every
        return step == last or bool(every and step % every == 0)

    def take(self, step: int, ask: Ask) -> Figures:
        """Ask all tasks; remember whether it was the best so far."""
        figures: Figures = {task.name: dict(ask(task)) for task in self.tasks}
        self._note(step, figures)
        return figures

    def _note(self, step: int, figures: Figures) -> None:
        task, _, figure = self.figure.rpartition("/")
        value = figures[task][figure]
        ahead = self.best is None or better(figure, value, self.best)
        self.best, self.worse = (value, 0) if ahead else (self.best, self.worse + 1)
        self.last_step = step
        self.lines.append(json.dumps({"step": step, "evaluation": figures}))

    @property
    def improved(self) -> bool:
        """Whether the newest one is the best."""
        return self.worse == 0 and self.best is not None

    def loss(self, figures: Figures) -> float:
        """Return the figure such that lower is better, as checkpoints are compared."""
        task, _, figure = self.figure.rpartition("/")
        value = figures[task][figure]
        return -value if better(figure, 1.0, 0.0) else value

    def recall(self, text: str, step: int) -> None:
        """Take what an earlier process of the run wrote, up to the step that it goes on from."""
        for line in text.splitlines():
            said = json.loads(line)
            if said["step"] <= step:
                self._note(said["step"], said["evaluation"])

    def text(self) -> str:
        """Return the file's text."""
        return "".join(f"{line}\n" for line in self.lines)

    def line(self, step: int, figures: Figures) -> str:
        """Return the newest figures in words."""
        behind = f"; no better one for {self.worse}" if self.worse else ""
        return f"step {step} · evaluation: {told(figures)}{behind}"


def keep(evaluations: Evaluations, folder: Path) -> None:
    """Write all figures so far, whole."""
    files.write_text(folder / EVALUATIONS, evaluations.text())


def recall(
    evaluations: Evaluations | None, folder: Path, step: int, told: Callable[[str], str]
) -> None:
    """Take up what a run wrote before it is gone on with; all ranks hear what one has read."""
    if evaluations is None:
        return
    file = folder / EVALUATIONS
    text = told(file.read_text(encoding="utf-8") if step and file.is_file() else "")
    try:
        evaluations.recall(text, step)
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{file}: is damaged; remove it, and evaluations begin anew") from None


def open_evaluations(
    config: EvaluateConfig, tokenizer: Tokenizer | None, vocabulary: int, longest: int
) -> Evaluations:
    """Read all tasks; tokens that the model does not have are refused."""
    if tokenizer is None:
        raise InputError("evaluate: tasks are text, but the data have no tokenizer; name one")
    tasks = [open_task(task, tokenizer, longest=longest) for task in config.tasks]
    for task in tasks:
        for item in task.items:
            check_vocabulary(np.asarray(item.tokens), vocabulary, f"evaluate: {task.name}")
    return Evaluations(config, tasks)
