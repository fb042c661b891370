"""Figures for experiment trackers: Weights & Biases, MLflow, Trackio, imported where asked for.

All work offline: the first keeps runs in a folder that `wandb sync` sends later, the others in a
store beside the figures. A tracker that fails later does not end the training: it is left out.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tutti.errors import InputError
from tutti.files import write_text
from tutti.observe.record import StepRecord

T = TypeVar("T")
Warn = Callable[[str], None]


class _Tracker:
    """Takes scalars by step, until it fails."""

    package = ""

    def __init__(self, folder: Path, warn: Warn) -> None:
        self._folder, self._warn = folder, warn
        self._works = True
        try:
            self._library: Any = importlib.import_module(self.package)
        except ImportError:
            raise InputError(
                f"measure.{self.package}: the package '{self.package}' is not installed; "
                f"pip install {self.package}"
            ) from None

    def _opened(self, open_: Callable[[], T]) -> T:
        try:
            return open_()
        except Exception as error:  # a server that does not answer, a project that is not ours
            raise InputError(
                f"measure.{self.package}: cannot be opened ({_said(error)})"
            ) from error

    def _known_run(self, after: int) -> str | None:
        """Return the run that a resumed job goes on with."""
        file = self._folder / f"{self.package}.id"
        return file.read_text(encoding="utf-8").strip() if after and file.is_file() else None

    def _remember_run(self, run: str) -> None:
        write_text(self._folder / f"{self.package}.id", run + "\n")

    def _try(self, work: Callable[[], object]) -> None:
        if not self._works:
            return
        try:
            work()
        except Exception as error:
            self._works = False
            self._warn(f"{self.package} failed and is left out from here on ({_said(error)})")

    def _log(self, values: Mapping[str, float], step: int) -> None:
        raise NotImplementedError

    def write(self, record: StepRecord) -> None:
        """Send every figure."""
        self._try(lambda: self._log(record.scalars(), record.step))

    def validation(self, step: int, loss: float) -> None:
        """Send the loss."""
        self._try(lambda: self._log({"validation_loss": loss}, step))


class WeightsAndBiases(_Tracker):
    """A run of a project of Weights & Biases."""

    package = "wandb"

    def __init__(
        self,
        project: str,
        folder: Path,
        *,
        mode: str = "offline",
        after: int = 0,
        facts: Mapping[str, object],
        warn: Warn,
    ) -> None:
        super().__init__(folder, warn)
        known = self._known_run(after)
        self._run: Any = self._opened(
            lambda: self._library.init(
                project=project, name=folder.name, dir=str(folder), mode=mode, id=known,
                resume="allow" if known else None, config=dict(facts),
            )
        )  # fmt: skip
        self._remember_run(str(self._run.id))

    def _log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Send what is left."""
        self._try(self._run.finish)


class MlFlow(_Tracker):
    """A run of an experiment of MLflow."""

    package = "mlflow"

    def __init__(
        self,
        experiment: str,
        folder: Path,
        *,
        uri: str = "",
        after: int = 0,
        facts: Mapping[str, object],
        warn: Warn,
    ) -> None:
        super().__init__(folder, warn)
        store = uri or (folder / "mlruns").resolve().as_uri()
        self._opened(lambda: self._library.set_tracking_uri(store))
        self._opened(lambda: self._library.set_experiment(experiment))
        known = self._known_run(after)
        named = {"run_id": known} if known else {"run_name": folder.name}
        run: Any = self._opened(lambda: self._library.start_run(**named))
        self._remember_run(str(run.info.run_id))
        if not known:
            self._try(lambda: self._library.log_params(dict(facts)))

    def _log(self, values: Mapping[str, float], step: int) -> None:
        self._library.log_metrics(dict(values), step=step)

    def close(self) -> None:
        """End the run."""
        self._try(self._library.end_run)


class Trackio(_Tracker):
    """A run of a project of Trackio, in a store of its own in the run's folder."""

    package = "trackio"

    def __init__(self, folder: Path, facts: Mapping[str, object], warn: Warn) -> None:
        # where it keeps runs is read when it is imported
        os.environ.setdefault("TRACKIO_DIR", str((folder / "trackio").resolve()))
        super().__init__(folder, warn)
        self._run: Any = self._opened(
            lambda: self._library.init(
                project="tutti", name=folder.name, config=dict(facts), embed=False
            )
        )

    def _log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Write what is left."""
        self._try(self._run.finish)


def trackio_sink(folder: Path, facts: Mapping[str, object]) -> Trackio:
    """Return Trackio as a sink: the entry point `trackio` of `tutti.sinks`."""
    return Trackio(folder, facts, warnings.warn)


def wandb_sink(folder: Path, facts: Mapping[str, object]) -> WeightsAndBiases:
    """Return Weights & Biases, offline, as a sink: the entry point `wandb` of `tutti.sinks`."""
    return WeightsAndBiases("tutti", folder, facts=facts, warn=warnings.warn)


def _said(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
