"""Where figures go: a file of JSON lines, TensorBoard, Prometheus."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from tutti.errors import InputError
from tutti.files import write_text
from tutti.observe.folder import SOON
from tutti.observe.record import StepRecord


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
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._soon_path = path.with_name(SOON)
        self._soon = self._soon_path.open("wb", buffering=0)

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
    found = [line for line in _lines(path) if line.endswith("\n")]  # the last may be cut off
    last = max((_step_of(line) for line in found if '"loss"' in line), default=0)
    later = [line for line in _lines(path.with_name(SOON)) if last < _step_of(line) < _CUT_OFF]
    return [*found, *later]


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []


_CUT_OFF = 1 << 62  # the step of a line that is none


def _step_of(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):  # cut off in the middle when the run was killed
        return _CUT_OFF


class TensorBoard:
    """Scalars in an event file."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise InputError(
                "measure.tensorboard: the package 'tensorboard' is not installed; "
                "pip install 'tutti-ml[observe]'"
            ) from None
        self._writer: Any = SummaryWriter(str(folder))

    def write(self, record: StepRecord) -> None:
        """Write every figure."""
        for name, value in record.scalars().items():
            self._writer.add_scalar(name, value, record.step)

    def validation(self, step: int, loss: float) -> None:
        """Write the loss."""
        self._writer.add_scalar("validation_loss", loss, step)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class Prometheus:
    """Gauges that a Prometheus server fetches over HTTP."""

    def __init__(self, port: int, address: str = "127.0.0.1") -> None:
        try:
            import prometheus_client
        except ImportError:
            raise InputError(
                "measure.prometheus_port: the package 'prometheus-client' is not installed; "
                "pip install 'tutti-ml[observe]'"
            ) from None
        self._registry = prometheus_client.CollectorRegistry()
        self._client: Any = prometheus_client
        self._gauges: dict[str, Any] = {}
        try:
            self._server, self._thread = prometheus_client.start_http_server(
                port, address, registry=self._registry
            )
        except OSError as error:
            raise InputError(
                f"measure.prometheus_port: {port} cannot be listened on ({error.strerror})"
            ) from None

    def _set(self, name: str, value: float, pool: str = "") -> None:
        plain = "tutti_" + re.sub(r"[^a-z0-9_]", "_", name.lower())
        if plain not in self._gauges:
            labels = ("pool",) if pool else ()
            self._gauges[plain] = self._client.Gauge(plain, name, labels, registry=self._registry)
        gauge = self._gauges[plain]
        (gauge.labels(pool) if pool else gauge).set(value)

    def write(self, record: StepRecord) -> None:
        """Set every gauge."""
        self._set("step", record.step)
        for name, value in record.scalars().items():
            pool, slash, figure = name.rpartition("/")
            self._set(f"pool_{figure}" if slash else name, value, pool)

    def validation(self, step: int, loss: float) -> None:
        """Set the gauge."""
        del step
        self._set("validation_loss", loss)

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


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
