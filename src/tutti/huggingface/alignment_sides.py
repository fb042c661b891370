"""The sides that `tutti align` can run, by name; each is imported when it is asked for.

A side takes a model folder and a batch and records what it computes. One that lives elsewhere
(`nn`, the engine) registers itself by name as "module:function"; nothing here imports it.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from tutti.errors import InputError, hint
from tutti.huggingface.dumps import Batch, DumpFacts, DumpWriter
from tutti.models import ModelSpec

_SIDES: dict[str, str] = {"hf": "tutti.huggingface.transformers_side:run"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a side is asked to run."""

    folder: Path
    spec: ModelSpec
    batch: Batch
    dtype: str  # as torch calls it
    device: str
    gradients: bool


class Side(Protocol):
    """Runs a model and records what it computes, in the order of execution."""

    def __call__(self, task: Task, writer: DumpWriter) -> None:
        """Record "forward/…" and, if asked for, "gradient/…" through the writer."""


def register_side(name: str, function: str) -> None:
    """Make a side known; `function` is "module:name" and is imported when the side runs."""
    _SIDES[name] = function


def side_names() -> tuple[str, ...]:
    """Return the sides that can be asked for."""
    return tuple(sorted(_SIDES))


def load_side(name: str) -> Side:
    """Return a side, importing it."""
    if name not in _SIDES:
        raise InputError(f"--side is '{name}'; {hint(name, _SIDES)}")
    module, _, function = _SIDES[name].partition(":")
    try:
        return cast(Side, getattr(importlib.import_module(module), function))
    except ModuleNotFoundError as error:
        raise InputError(
            f"--side {name}: needs the Python package '{error.name}', which is not installed"
        ) from None


def write_dump(side: str, task: Task, target: Path) -> None:
    """Run a side and write its dump."""
    run = load_side(side)
    sequences, length = task.batch.tokens.shape
    facts = DumpFacts(
        side=side,
        model=task.spec.name,
        model_type=task.spec.model_type,
        model_hash=task.spec.fingerprint,
        dtype=task.dtype,
        device=task.device,
        sequences=sequences,
        length=length,
        seed=task.batch.seed,
        batch_sha256=task.batch.sha256,
        versions=versions(),
    )
    with DumpWriter(target, facts, task.batch) as writer:
        run(task, writer)


def versions() -> dict[str, str]:
    """Return the versions of what computes."""
    from importlib.metadata import PackageNotFoundError, version

    installed = {}
    for package in ("tutti-ml", "torch", "transformers", "numpy"):
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            continue
    return installed
