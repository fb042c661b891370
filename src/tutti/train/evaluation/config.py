"""The `evaluate:` part of a training file. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from tutti.document import Natural, Place, build_fields, plain_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskConfig:
    """One task: a file of records."""

    path: str
    name: str = ""  # what figures are called; default: the file's name
    kind: Literal["auto", "choices", "text"] = "auto"
    delimiter: str = " "  # between a context and a choice
    most: Natural = 0  # records; 0: all

    document_shape: ClassVar[tuple[type, ...]] = (str, dict)

    @classmethod
    def from_document(cls, value: object, place: Place) -> TaskConfig:
        """Read a path alone, or the fields."""
        if isinstance(value, str):
            value = {"path": value}
        return build_fields(cls, value, place)

    def to_document(self) -> object:
        """Write the path alone where nothing else is said."""
        written = plain_fields(self)
        return self.path if set(written) == {"path"} else written

    @property
    def title(self) -> str:
        """What figures are called."""
        return self.name or Path(self.path).stem


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateConfig:
    """When tasks are taken, and what follows from them."""

    tasks: tuple[TaskConfig, ...]
    every: Natural = 0  # steps; 0: after the last one only
    best: str = ""  # TASK/FIGURE that tells checkpoints apart; default: the first task's own
    patience: Natural = 0  # evaluations without a better one, then the run ends; 0: never

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ValueError("'tasks' is empty; name files, as in tasks: [questions.jsonl]")
        titles = [task.title for task in self.tasks]
        for title in titles:
            if titles.count(title) > 1:
                raise ValueError(f"two tasks are called '{title}'; give one a 'name'")
        if self.patience and not self.every:
            raise ValueError("'patience' counts evaluations; say how often with 'every'")
