"""A save or an export that fails is no success; what is not there can be made by a resume."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.support.tiny import write_model
from tests.unit.train.checkpoint.test_folders import published
from tutti.document import Place, build
from tutti.errors import InputError, StoppedError, TuttiError
from tutti.train.checkpoint import Alone, Progress, Saved
from tutti.train.run import ending
from tutti.train.run.config import TrainConfig
from tutti.train.run.result import result_of


class Run:
    """As much of a rank as an end needs."""

    def __init__(self, folder: Path, *, step: int = 12, problem: str = "") -> None:
        written = {
            "model": str(write_model(folder / "model")),
            "steps": 12,
            "data": {"train": [{"kind": "synthetic"}]},
            "output": str(folder / "out"),
        }
        self.config = build(TrainConfig, written, Place("test"))
        self.progress = Progress(step=step)
        self.said: list[str] = []
        self.checkpointer: Any = SimpleNamespace(
            history=[], save=self.save, wait=lambda: None,
            failure=lambda saved: f"checkpoint of step {saved.step} failed ({saved.problem})",
        )  # fmt: skip
        self.problem = problem
        published(folder / "out" / "checkpoints", 5)

    def save(self, engine: object, progress: Progress) -> None:
        figures = {"staging_s": 0.0, "writing_s": 0.0, "waiting_s": 0.0, "num_bytes": 0}
        saved = Saved(step=progress.step, problem=self.problem, **figures)  # type: ignore[arg-type]
        self.checkpointer.history.append(saved)
        if not self.problem:
            published(Path(self.config.output) / "checkpoints", progress.step)

    def finish(self, losses: list[float]) -> dict[str, Any]:
        history = ending.History(first_step=0)
        for loss in losses:
            history.add(loss, 0.1)
        context: Any = SimpleNamespace(
            config=self.config, rank=0,
            plan=SimpleNamespace(job=SimpleNamespace(tokens=100, average=False)),
            say=self.said.append, warn=self.said.append, spec=SimpleNamespace(tuning=None),
        )  # fmt: skip
        nothing: Any = None
        return ending.finish(
            ending.Ended(
                context=context,
                engine=nothing,
                checkpointer=self.checkpointer,
                saving=Alone(),
                progress=self.progress,
                history=history,
                stopped_by=0,
                predicted_s=1.0,
                mfu=lambda seconds: 0.5,
            )
        )


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []

    def export(checkpoint: Path, target: Path) -> None:
        found.append(checkpoint.name)
        target.mkdir()
        (target / "config.json").write_text(checkpoint.name)

    monkeypatch.setattr(ending, "export_hf", export)
    return found


def test_a_last_save_that_failed_is_an_error_and_exports_nothing(
    tmp_path: Path, exported: list[str]
) -> None:
    run = Run(tmp_path, problem="No space left on device")
    with pytest.raises(TuttiError) as failed:
        run.finish([2.0, 1.0])
    assert failed.value.exit_code == 1
    assert str(failed.value) == (
        "checkpoint of step 12 failed (No space left on device); mend it and go on with --resume"
    )
    assert exported == []
    assert not (tmp_path / "out" / "huggingface").exists()


def test_an_export_is_of_the_last_step(tmp_path: Path, exported: list[str]) -> None:
    found = Run(tmp_path).finish([2.0, 1.0])
    assert exported == ["step-000012"]
    assert found["huggingface"] == str(tmp_path / "out" / "huggingface")
    assert (found["steps"], found["stopped_by"]) == (12, 0)


@pytest.mark.parametrize("error", [InputError("no map"), OSError(28, "No space left on device")])
def test_an_export_that_failed_is_an_error_and_a_resume_writes_it(
    tmp_path: Path, exported: list[str], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    working = ending.export_hf

    def export(checkpoint: Path, target: Path) -> None:
        target.with_name(f"{target.name}.partial").mkdir()
        raise error

    monkeypatch.setattr(ending, "export_hf", export)
    with pytest.raises(TuttiError, match=r"no Hugging Face folder could be written: .*--resume"):
        Run(tmp_path).finish([2.0, 1.0])
    assert not list((tmp_path / "out").glob(".huggingface*"))
    monkeypatch.setattr(ending, "export_hf", working)
    again = Run(tmp_path)
    assert again.finish([])["huggingface"] == str(tmp_path / "out" / "huggingface")
    assert exported == ["step-000012"]
    again.finish([])  # it is there now
    assert exported == ["step-000012"]


def test_a_model_that_is_a_name_has_no_folder_to_export(tmp_path: Path, exported: Any) -> None:
    run = Run(tmp_path)
    run.config = build(
        TrainConfig,
        {"model": "gpt2", "steps": 12, "data": {"train": [{"kind": "synthetic"}]},
         "output": str(tmp_path / "out")},
        Place("test"),
    )  # fmt: skip
    assert run.finish([1.0])["huggingface"] is None
    assert run.said == ["no Hugging Face folder: 'gpt2' is a name, and has no config.json"]


@pytest.mark.parametrize(("asked_by", "code"), [(2, 130), (15, 143), (0, 143)])
def test_an_unfinished_run_says_by_whom(
    tmp_path: Path, exported: list[str], asked_by: int, code: int
) -> None:
    run = Run(tmp_path, step=7)
    summary = run.finish([2.0, 1.0])
    assert exported == []
    job: Any = SimpleNamespace(config=run.config)
    result = result_of(summary, job, asked_by=asked_by)
    assert not result.finished
    assert result.to_document()["finished"] is False
    with pytest.raises(StoppedError, match="after step 7; saved; go on with --resume") as stopped:
        result.require_finished()
    assert stopped.value.exit_code == code


def test_a_finished_run_is_finished_whoever_asked(tmp_path: Path, exported: list[str]) -> None:
    run = Run(tmp_path)
    job: Any = SimpleNamespace(config=run.config)
    result_of(run.finish([1.0]), job, asked_by=15).require_finished()
