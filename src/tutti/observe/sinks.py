"""Where figures go: a file of JSON lines, TensorBoard, sinks of others; Prometheus has its own."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

from tutti.errors import InputError, hint
from tutti.files import write_text
from tutti.observe.folder import SOON
from tutti.observe.record import StepRecord
from tutti.plug_ins import reason


class Sink(Protocol):
    """Takes the records of steps, in order."""

    def write(self, record: StepRecord) -> None:
        """Take one."""

    def validation(self, step: int, loss: float) -> None:
        """Take a loss on held-out data."""

    def close(self) -> None:
        """Take no more."""


class JsonLines:
    """One object per line; a resumed run goes on after the step that it resumes from.

    The line of a step is written when all its figures are there, a step or two later. What is known
    already lies in a file beside it, for a process may be killed at any moment.
    """

    def __init__(self, path: Path, *, after: int = 0) -> None:
        kept = [line for line in figure_lines(path) if _step_of(line) <= after]
        write_text(path, "".join(kept))
        self._path, self._soon_path = path, path.with_name(SOON)
        self._open()

    def _open(self) -> None:
        self._file = self._path.open("a", encoding="utf-8", buffering=1)
        self._soon = self._soon_path.open("wb", buffering=0)

    def reopen(self) -> None:
        """Go on in a file of the same name, for the folder is another one."""
        self._file.close()
        self._soon.close()
        self._open()

    def soon(self, records: Sequence[StepRecord]) -> None:
        """Keep what is known of steps whose lines are still to come."""
        text = "".join(json.dumps(record.to_document()) + "\n" for record in records).encode()
        os.pwrite(self._soon.fileno(), text, 0)
        os.ftruncate(self._soon.fileno(), len(text))

    def write(self, record: StepRecord) -> None:
        """Write a line."""
        self._file.write(json.dumps(record.to_document()) + "\n")

    def validation(self, step: int, loss: float) -> None:
        """Write a line."""
        self._file.write(json.dumps({"step": step, "validation_loss": loss}) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        self._soon.close()
        self._soon_path.unlink(missing_ok=True)


def figure_lines(path: Path) -> list[str]:
    """Return the lines of a run's figures, and of steps before whose lines it was killed."""
    whole_lines = [line for line in _lines(path) if line.endswith("\n")]  # the last may be cut off
    last = max((_step_of(line) for line in whole_lines if '"loss"' in line), default=0)
    later = [line for line in _lines(path.with_name(SOON)) if last < _step_of(line) < _CUT_OFF]
    return [*whole_lines, *later]


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []


_CUT_OFF = 1 << 62  # the step of a line that is none


def _step_of(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):  # cut off in the middle when the run was killed
        return _CUT_OFF


class TensorBoard:
    """Scalars in an event file; the package `tensorboard` alone is enough."""

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            raise InputError(
                "measure.tensorboard: the package 'tensorboard' is not installed; "
                "pip install 'tutti-ml[observe]'"
            ) from None
        self._event: Any = event_pb2.Event
        self._summary: Any = summary_pb2.Summary
        self._writer: Any = EventFileWriter(str(folder))

    def _add(self, values: Mapping[str, float], step: int) -> None:
        each = [self._summary.Value(tag=n, simple_value=v) for n, v in values.items()]
        summary = self._summary(value=each)
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))

    def write(self, record: StepRecord) -> None:
        """Write every figure."""
        self._add(record.scalars(), record.step)

    def validation(self, step: int, loss: float) -> None:
        """Write the loss."""
        self._add({"validation_loss": loss}, step)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class Sinks:
    """All of them as one."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = list(sinks)

    def write(self, record: StepRecord) -> None:
        """Give a record to each."""
        for sink in self._sinks:
            sink.write(record)

    def validation(self, step: int, loss: float) -> None:
        """Give the loss to each."""
        for sink in self._sinks:
            sink.validation(step, loss)

    def close(self) -> None:
        """Close each."""
        for sink in self._sinks:
            sink.close()


GROUP = "tutti.sinks"


def sink_of_others(name: str, folder: Path, facts: Mapping[str, object]) -> Sink:
    """Return a sink that an installed package offers under an entry point of `tutti.sinks`.

    It names a function of the run's folder and facts about the run, which returns the sink.
    """
    known = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in known:
        remedy = hint(name, known) if known else f"no installed package offers one ({GROUP})"
        raise InputError(f"measure.sinks: no sink '{name}'; {remedy}")
    try:
        made: Sink = known[name].load()(folder, facts)
    except Exception as error:  # another's package may fail in any way
        raise InputError(f"measure.sinks: '{name}' cannot be opened ({reason(error)})") from error
    return made
