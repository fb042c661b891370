"""`tutti.Trainer`: three lines for a Hugging Face user, and no torch before a rank needs it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import tutti
from tests.support.tiny import write_model
from tutti.errors import InputError
from tutti.plan.files import save_plan
from tutti.train.data.config import DataConfig, SourceConfig
from tutti.train.run.trainer import Trainer

JOB = {"sequence_length": 64, "global_batch": 4, "precision": "fp32", "pools": ["fast"],
       "tp_max": 1, "max_stages": 1, "schedules": ["1f1b"], "shard": [0]}  # fmt: skip


def test_it_is_found_on_the_package() -> None:
    assert tutti.Trainer is Trainer


def test_planning_needs_no_torch(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    code = (
        "import sys, tutti\n"
        "trainer = tutti.Trainer.from_pretrained('model', cluster='laptop',\n"
        f"    job={JOB!r})\n"
        "assert trainer.prepare().plan.num_ranks >= 1\n"
        "trainer.prepare().save()\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_options_are_the_keys_of_a_training_file() -> None:
    trainer = Trainer.from_pretrained("gpt2", cluster="laptop", steps=7, job=JOB)
    assert trainer.config.steps == 7
    assert trainer.config.job.global_batch == 4
    with pytest.raises(InputError, match="did you mean 'steps'"):
        Trainer.from_pretrained("gpt2", step=7)


def test_a_plan_may_be_given_as_one_or_as_a_file(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    plan = Trainer.from_pretrained(model, cluster="laptop", job=JOB).prepare().plan
    save_plan(plan, tmp_path / "plan.json")
    for given in (plan, tmp_path / "plan.json"):
        assert Trainer.from_pretrained(model, plan=given).prepare().plan == plan
    with pytest.raises(InputError, match=r"the plan is for model 'model', but 'gpt2' has another"):
        Trainer.from_pretrained("gpt2", plan=plan).prepare()


def test_sequences_beyond_learned_positions_are_refused_before_a_rank_starts() -> None:
    longer = {**JOB, "sequence_length": 1025}
    with pytest.raises(InputError, match=r"1,025 tokens is longer than the 1,024 learned pos"):
        Trainer.from_pretrained("gpt2", cluster="laptop", job=longer).prepare()
    plan = Trainer.from_pretrained("gpt2", cluster="laptop", job=JOB).prepare().plan
    beyond = replace(plan, job=replace(plan.job, sequence_length=2048))
    with pytest.raises(InputError, match="longer than the 1,024 learned positions of 'gpt2'"):
        Trainer.from_pretrained("gpt2", plan=beyond).prepare()


@pytest.mark.parametrize(
    ("data", "paths"),
    [
        ("a/*.jsonl", ["a/*.jsonl"]),
        (Path("b.txt"), ["b.txt"]),
        (["a.txt", "b.txt"], ["a.txt", "b.txt"]),
        (DataConfig(train=(SourceConfig(path="c.txt"),)), ["c.txt"]),
    ],
)
def test_fit_takes_data_in_several_forms(
    data: object, paths: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    def run_local(job: object, **words: object) -> None:
        started.append((job, words))

    monkeypatch.setattr("tutti.train.run.trainer.run_local", run_local)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    trainer = Trainer.from_pretrained(write_model(tmp_path / "model"), cluster="laptop", job=JOB)
    trainer.prepare()
    trainer.fit(data, steps=3, resume=True)  # type: ignore[arg-type]
    ((job, words),) = started
    assert [source.path for source in job.config.data.train] == paths  # type: ignore[attr-defined]
    assert job.config.steps == 3  # type: ignore[attr-defined]
    assert words["resume"] is True
