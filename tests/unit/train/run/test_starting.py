"""What is refused before a rank starts, and what a restarted job does by itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.unit.ranks.test_rendezvous import FakeStore
from tests.unit.train.checkpoint.test_folders import published
from tutti.document import Place, build
from tutti.errors import InputError, TuttiError
from tutti.ranks import rendezvous
from tutti.train.checkpoint.manifest import Progress
from tutti.train.run import rank, starting
from tutti.train.run.agreement import job_facts
from tutti.train.run.config import TrainConfig


def config_of(folder: Path, **more: Any) -> TrainConfig:
    written = {"model": "gpt2", "data": {"train": [{"kind": "synthetic"}]}, "timeout_s": 3,
               "output": str(folder / "out"), **more}  # fmt: skip
    return build(TrainConfig, written, Place("test"))


def left_by_a_run(folder: Path) -> Path:
    """Write what a run leaves, and a file of somebody else's."""
    out = folder / "out"
    published(out / "checkpoints", 4)
    (out / "checkpoints" / "step-000008.partial").mkdir()
    (out / "checkpoints" / "mine.txt").write_text("kept")
    (out / "huggingface").mkdir()
    (out / "huggingface" / "config.json").write_text("{}")
    (out / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    (out / "trace-step-3.json").write_text("{}")
    (out / "notes.txt").write_text("kept")
    return out


def test_a_folder_with_a_run_is_refused_in_one_line(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    starting.check_inputs(config, False)
    out = left_by_a_run(tmp_path)
    with pytest.raises(InputError) as refused:
        starting.check_inputs(config, False)
    assert str(refused.value) == (
        f"{out}: holds 1 checkpoint, figures and a Hugging Face folder of an earlier run; go on "
        "with it (--resume), begin anew over it (--overwrite), or name another --output"
    )
    starting.check_inputs(config, True)
    starting.check_inputs(config, 4)
    starting.check_inputs(config, False, overwrite=True)
    with pytest.raises(InputError, match="choose one"):
        starting.check_inputs(config, True, overwrite=True)
    with pytest.raises(InputError, match="holds no checkpoint of step 5; there are 4"):
        starting.check_inputs(config, 5)


def test_a_start_that_failed_is_no_run(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "logs").mkdir(parents=True)
    for name in ("run.json", "plan.json", "metrics.jsonl"):
        (out / name).touch()
    starting.check_inputs(config_of(tmp_path), False)


def test_overwriting_deletes_the_run_and_nothing_else(tmp_path: Path) -> None:
    out = left_by_a_run(tmp_path)
    starting.take_folder(out, overwrite=True, fresh=False).release()
    left = sorted(path.relative_to(out).as_posix() for path in out.rglob("*"))
    assert left == [".lock", "checkpoints", "checkpoints/mine.txt", "notes.txt"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"data": {"train": ["corpse/*.txt"]}}, "no file matches"),
        ({"data": {"train": ["shipped:tails"]}}, "did you mean 'tales'"),
        ({"data": {"train": ["shipped:tales"]}}, "'tokenizer' is missing"),
        ({"data": {"train": ["shipped:tales"], "tokenizer": "nowhere"}}, "no folder 'nowhere'"),
        ({"start": "pretrained"}, "holds no .safetensors"),
    ],
)
def test_what_is_missing_is_said_before_ranks_start(tmp_path: Path, more: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        starting.check_inputs(config_of(tmp_path, **more), False)


def test_nothing_to_resume_is_said_before_ranks_start(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no complete checkpoint to resume from"):
        starting.check_inputs(config_of(tmp_path), True)


def test_another_batch_is_bad_input() -> None:
    starting.check_batch(Progress(step=3, samples=12), 4)
    with pytest.raises(InputError, match="had a global batch of 4, the plan has 6"):
        starting.check_batch(Progress(step=3, samples=12), 6)


# --- launched ranks ----------------------------------------------------------------------------


class FakeJob:
    """A job that was planned: saving it writes the plan's file."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config

    def save(self) -> None:
        (self.config.folder / "plan.json").write_text("{}")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Call start_together as a rank of a launcher, whose store is a dictionary."""
    store = FakeStore()
    claims = []
    monkeypatch.setattr(rendezvous, "open_store", lambda timeout_s: store)
    monkeypatch.setattr(rank, "check_resumed", lambda job, resume: None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("TUTTI_ATTEMPT", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)

    def start(config: TrainConfig, number: int = 0, **words: Any) -> Any:
        monkeypatch.setenv("RANK", str(number))
        monkeypatch.setattr(rank, "_starts", iter(range(9)))
        found = rank.start_together(replace(config, plan="p"), make=FakeJob, **words)
        if number == 0:
            claims.append(found)
        return found

    yield SimpleNamespace(start=start, store=store, environ=monkeypatch.setenv)
    for one in claims:
        one.release()


def test_rank_0_decides_for_all(tmp_path: Path, launched: Any) -> None:
    left_by_a_run(tmp_path)
    config = config_of(tmp_path)
    assert launched.start(config, resume=4).resume == 4
    assert launched.start(config, 1).resume == 4  # another rank's own --resume does not count
    with pytest.raises(InputError, match="another job writes there now"):
        launched.start(config, resume=True)


def test_all_ranks_hear_why_rank_0_refuses(tmp_path: Path, launched: Any) -> None:
    left_by_a_run(tmp_path)
    with pytest.raises(InputError, match=r"^.*out: holds 1 checkpoint"):
        launched.start(config_of(tmp_path))
    told = ["start read/0", "start read/1"]
    assert launched.store.awaited[-1] == told  # it keeps the store until the other has read it
    with pytest.raises(InputError, match=r"^rank 0: .*out: holds 1 checkpoint") as heard:
        launched.start(config_of(tmp_path), 1)
    assert launched.store.check(told)
    assert heard.value.exit_code == 2
    launched.store.set("start", json.dumps({"error": "no plan fits", "code": 1}))
    with pytest.raises(TuttiError, match="no plan fits") as failed:
        launched.start(config_of(tmp_path), 1)
    assert failed.value.exit_code == 1


@pytest.mark.parametrize(
    "variable", ["TUTTI_ATTEMPT", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"]
)
def test_a_restarted_job_goes_on_whatever_it_was_told(
    tmp_path: Path, launched: Any, variable: str
) -> None:
    out = left_by_a_run(tmp_path)
    launched.environ(variable, "1")
    found = launched.start(config_of(tmp_path), overwrite=True)
    assert found.resume is True
    assert (out / "checkpoints" / "step-000004").is_dir()


def test_a_restart_before_the_first_checkpoint_begins_anew(tmp_path: Path, launched: Any) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    launched.environ("TUTTI_ATTEMPT", "1")
    assert launched.start(config_of(tmp_path)).resume is False


def test_a_refused_job_is_refused_again_when_it_is_restarted(tmp_path: Path, launched: Any) -> None:
    """Launchers restart whatever fails; that must not make a forgotten --resume out of it."""
    left_by_a_run(tmp_path)
    with pytest.raises(InputError, match="of an earlier run"):
        launched.start(config_of(tmp_path))
    launched.environ("TUTTI_ATTEMPT", "1")
    with pytest.raises(InputError, match="of an earlier run"):
        launched.start(config_of(tmp_path))
    launched.environ("SLURM_JOB_ID", "7")  # another job, which held the folder before
    other = launched.start(config_of(tmp_path))
    assert other.resume is True
    other.claim.release()
    launched.environ("SLURM_JOB_ID", "")
    launched.environ("TUTTI_ATTEMPT", "0")
    assert launched.start(config_of(tmp_path), resume=True).resume is True
    assert not (tmp_path / "out" / ".refused").exists()


def test_ranks_compare_their_checkpoint_settings(tmp_path: Path) -> None:
    from tests.support.tiny import write_model
    from tutti.train.run.trainer import Trainer

    model = write_model(tmp_path / "model")
    job = {"sequence_length": 64, "global_batch": 4, "precision": "fp32", "pools": ["fast"],
           "tp_max": 1, "max_stages": 1, "schedules": ["1f1b"], "shard": [0]}  # fmt: skip
    found = Trainer.from_pretrained(model, cluster="laptop", job=job).prepare()
    other = replace(
        found, config=replace(found.config, checkpoints=replace(found.config.checkpoints, every=7))
    )
    store: Any = FakeStore()
    rendezvous.agree(store, 1, 0, job_facts(other), 3)
    with pytest.raises(InputError, match=r"rank 1 has checkpoint settings '{\"every\": 7}', r"):
        rendezvous.agree(store, 0, 2, job_facts(found), 3)
