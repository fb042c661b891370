"""Tasks during a run as a user has them: figures, the best checkpoint, an early end, resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tutti.document import Place, build
from tutti.recipes.catalog import copy, find
from tutti.train.run.config import TrainConfig
from tutti.train.run.trainer import Trainer

pytestmark = pytest.mark.slow


def config_of(folder: Path, output: str, **words: Any) -> TrainConfig:
    task = folder / "sums.jsonl"
    lines = [
        {"context": f"Add {i} and 1.", "choices": [f"{i + 1}", "x"], "answer": 0} for i in range(5)
    ]
    task.write_text("".join(json.dumps(line) + "\n" for line in lines))
    written = {
        "model": str(folder / "tiny-model"),
        "cluster": "here",
        "ranks": 1,
        "data": {"train": [str(folder / "chats.jsonl")], "tokenizer": "bytes"},
        "job": {"sequence_length": 64, "global_batch": 2, "precision": "fp32"},
        "evaluate": {"tasks": [str(task)], "every": 2, "best": "sums/answer_loss", "patience": 2},
        "optimizer": {"learning_rate": 5e-3, "weight_decay": 0},
        "steps": 20,
        "output": str(folder / output),
        **words,
    }
    return build(TrainConfig, written, Place("test"))


def test_a_run_without_a_better_figure_ends_and_its_best_is_kept(tmp_path: Path) -> None:
    copy(find("sft"), tmp_path)
    still = {"learning_rate": 1e-12, "weight_decay": 0, "schedule": "constant"}
    result = Trainer(config_of(tmp_path, "still", optimizer=still)).fit()
    lines = (result.output / "evaluations.jsonl").read_text().splitlines()
    figures = [json.loads(line)["evaluation"]["sums"]["answer_loss"] for line in lines]
    assert result.finished
    assert result.steps < 20
    assert len(figures) == result.steps // 2
    assert result.huggingface is not None
    assert result.best is not None
    assert figures[int(result.best.name.rpartition("-")[2]) // 2 - 1] == min(figures)


def test_a_run_that_learns_goes_on_and_a_resumed_one_knows_its_figures(tmp_path: Path) -> None:
    copy(find("sft"), tmp_path)
    first = Trainer(config_of(tmp_path, "learns", steps=4)).fit()
    assert first.finished
    again = Trainer(config_of(tmp_path, "learns", steps=8)).fit(resume=True)
    lines = (again.output / "evaluations.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [2, 4, 6, 8]
    losses = [json.loads(line)["evaluation"]["sums"]["answer_loss"] for line in lines]
    assert losses[-1] < losses[0]
