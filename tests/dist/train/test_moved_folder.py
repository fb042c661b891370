"""A run's folder that is moved away or deleted: one line, and a new folder that is whole."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny import write_model
from tutti.document import Place, build
from tutti.train.run.config import TrainConfig
from tutti.train.run.trainer import Trainer


def config_of(folder: Path, **words: Any) -> TrainConfig:
    written = {
        "model": str(folder / "model"), "cluster": "here", "ranks": 1,
        "data": {"train": [{"kind": "synthetic"}]},
        "job": {"sequence_length": 32, "global_batch": 2, "precision": "fp32"},
        "optimizer": {"learning_rate": 1e-3, "schedule": "constant"},
        "steps": 40, "checkpoints": {"every": 30, "keep": 9}, "output": str(folder / "out"),
        **words,
    }  # fmt: skip
    return build(TrainConfig, written, Place("test"))


def steps_in(folder: Path) -> list[int]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


@pytest.mark.parametrize("how", ["moved", pytest.param("deleted", marks=pytest.mark.slow)])
def test_a_run_goes_on_in_a_new_folder(tmp_path: Path, how: str) -> None:
    write_model(tmp_path / "model")
    out, old = tmp_path / "out", tmp_path / "old"
    warned: list[str] = []

    def listen(event: Any) -> None:
        if event.kind == "warning":
            warned.append(event.values["text"])
        if event.kind == "step" and event.values["step"] == 4:
            out.rename(old)
            if how == "deleted":
                shutil.rmtree(old)

    result = Trainer(config_of(tmp_path)).fit(listener=listen)
    assert result.finished
    became = f"was moved to {old}" if how == "moved" else "was deleted"
    lines = [text for text in warned if "while the run writes in it" in text]
    assert lines == [
        f"{out} {became} while the run writes in it: checkpoints and figures go on in a new "
        "folder of that name"
    ]
    later = steps_in(out)
    assert later == list(range(later[0], 41))
    if how == "moved":
        assert steps_in(old) == list(range(1, later[0]))
        assert not (old / "checkpoints").exists()
    assert {path.name for path in (out / "checkpoints").glob("step-*")} == {
        "step-000030", "step-000040",
    }  # fmt: skip
    # the new folder is one that a run goes on from
    more = Trainer(config_of(tmp_path, steps=42)).fit(resume=True)
    assert more.finished
    assert steps_in(out) == list(range(later[0], 43))
