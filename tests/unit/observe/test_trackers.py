"""Trackers of experiments as sinks, with stand-ins that have the parts of their API we call."""

from __future__ import annotations

import os
import pkgutil
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tutti.errors import InputError
from tutti.observe.record import StepRecord
from tutti.observe.trackers import MlFlow, WeightsAndBiases, trackio_sink, wandb_sink

FACTS = {"model": "gpt2", "learning_rate": 3e-4}


def record(step: int) -> StepRecord:
    return StepRecord(
        step=step, loss=2.5, gradient_norm=1.0, learning_rate=1e-3, tokens=64, seconds=0.5,
        tokens_per_s=128.0, mfu=0.3, hfu=0.3,
    )  # fmt: skip


class Wandb(ModuleType):
    """Remembers what it is told; refuses arguments that the real one does not have."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.runs: list[Any] = []

    def init(
        self, *, project: str, name: str, dir: str, mode: str, id: str | None,  # noqa: A002
        resume: str | None, config: dict[str, object],
    ) -> Any:  # fmt: skip
        run = SimpleNamespace(
            project=project, mode=mode, resume=resume, config=config, logged=[], finished=False,
            id=id or f"run-{len(self.runs)}",
        )  # fmt: skip

        def log(values: dict[str, float], *, step: int) -> None:
            run.logged.append((step, values))

        def finish() -> None:
            run.finished = True

        run.log, run.finish = log, finish
        self.runs.append(run)
        return run


class Mlflow(ModuleType):
    def __init__(self) -> None:
        super().__init__("mlflow")
        self.calls: list[tuple[str, Any]] = []

    def set_tracking_uri(self, uri: str) -> None:
        self.calls.append(("uri", uri))

    def set_experiment(self, name: str) -> None:
        self.calls.append(("experiment", name))

    def start_run(self, *, run_id: str | None = None, run_name: str | None = None) -> Any:
        self.calls.append(("start", (run_id, run_name)))
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id or "abc"))

    def log_params(self, params: dict[str, object]) -> None:
        self.calls.append(("params", params))

    def log_metrics(self, metrics: dict[str, float], *, step: int) -> None:
        self.calls.append(("metrics", (step, metrics)))

    def end_run(self) -> None:
        self.calls.append(("end", None))


def test_wandb_keeps_everything_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    sink = WeightsAndBiases("mixed", tmp_path, facts=FACTS, warn=pytest.fail)
    sink.write(record(1))
    sink.validation(1, 2.75)
    sink.close()
    (run,) = wandb.runs
    assert (run.project, run.mode, run.resume, run.config) == ("mixed", "offline", None, FACTS)
    assert run.logged[0] == (1, record(1).scalars())
    assert run.logged[1] == (1, {"validation_loss": 2.75})
    assert run.finished


def test_a_resumed_job_goes_on_with_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb, mlflow = Wandb(), Mlflow()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    for after in (0, 5, 0):
        WeightsAndBiases("p", tmp_path, mode="online", after=after, facts={}, warn=pytest.fail)
        MlFlow("e", tmp_path, after=after, facts={}, warn=pytest.fail)
    assert [(run.id, run.resume) for run in wandb.runs] == [
        ("run-0", None),
        ("run-0", "allow"),
        ("run-2", None),  # from the start: another run
    ]
    starts = [value for call, value in mlflow.calls if call == "start"]
    assert starts == [(None, tmp_path.name), ("abc", None), (None, tmp_path.name)]


def test_mlflow_writes_beside_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = Mlflow()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    sink = MlFlow("mixed", tmp_path, facts=FACTS, warn=pytest.fail)
    sink.write(record(3))
    sink.validation(3, 2.0)
    sink.close()
    assert mlflow.calls == [
        ("uri", (tmp_path / "mlruns").as_uri()),
        ("experiment", "mixed"),
        ("start", (None, tmp_path.name)),
        ("params", FACTS),
        ("metrics", (3, record(3).scalars())),
        ("metrics", (3, {"validation_loss": 2.0})),
        ("end", None),
    ]
    MlFlow("mixed", tmp_path, uri="http://host:5000", facts=FACTS, warn=pytest.fail)
    assert ("uri", "http://host:5000") in mlflow.calls


@pytest.mark.parametrize(("kind", "package"), [(WeightsAndBiases, "wandb"), (MlFlow, "mlflow")])
def test_not_installed(
    kind: Any, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError) as error:
        kind("x", tmp_path, facts={}, warn=pytest.fail)
    assert str(error.value) == (
        f"measure.{package}: the package '{package}' is not installed; pip install {package}"
    )


def test_a_server_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start it is an error in one line; later the training goes on without it."""
    mlflow = Mlflow()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)

    def fails(*_: object, **__: object) -> None:
        raise ConnectionError("host:5000 refused\nat great length")

    warnings: list[str] = []
    sink = MlFlow("e", tmp_path, facts={}, warn=warnings.append)
    monkeypatch.setattr(mlflow, "log_metrics", fails, raising=False)
    for step in (1, 2, 3):
        sink.write(record(step))
    sink.close()
    assert warnings == ["mlflow failed and is left out from here on (host:5000 refused)"]
    monkeypatch.setattr(mlflow, "set_experiment", fails, raising=False)
    with pytest.raises(InputError, match=r"measure.mlflow: cannot be opened \(host:5000 refused\)"):
        MlFlow("e", tmp_path, facts={}, warn=pytest.fail)


class Trackio(ModuleType):
    def __init__(self) -> None:
        super().__init__("trackio")
        self.runs: list[Any] = []

    def init(self, *, project: str, name: str, config: dict[str, object], embed: bool) -> Any:
        run = SimpleNamespace(project=project, name=name, config=config, logged=[], finished=False)

        def log(values: dict[str, float], step: int) -> None:
            run.logged.append((step, values))

        def finish() -> None:
            run.finished = True

        run.log, run.finish = log, finish
        assert not embed
        self.runs.append(run)
        return run


def test_trackio_keeps_its_store_in_the_run_s_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Trackio()
    monkeypatch.setitem(sys.modules, "trackio", library)
    monkeypatch.setenv("TRACKIO_DIR", "")
    monkeypatch.delenv("TRACKIO_DIR")
    sink = trackio_sink(tmp_path, FACTS)
    sink.write(record(1))
    sink.validation(1, 2.0)
    sink.close()
    run = library.runs[0]
    assert os.environ["TRACKIO_DIR"] == str(tmp_path / "trackio")
    assert run.config == FACTS
    assert [step for step, _ in run.logged] == [1, 1]
    assert run.logged[0][1]["loss"] == 2.5
    assert run.finished


def test_sinks_by_entry_point_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[3]
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    offered = project["project"]["entry-points"]["tutti.sinks"]
    opened = {name: pkgutil.resolve_name(place) for name, place in offered.items()}
    assert opened == {"trackio": trackio_sink, "wandb": wandb_sink}
    monkeypatch.setitem(sys.modules, "wandb", Wandb())
    opened["wandb"](tmp_path, FACTS).close()
