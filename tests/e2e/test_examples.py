"""The scripts in examples/ run to the end; training files can be read and say how to run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tutti.models.load import load_model
from tutti.plan.check import check_plan
from tutti.plan.files import load_plan
from tutti.train.run.config import TrainConfig
from tutti.train.run.planning import load_cluster

ROOT = Path(__file__).parents[2]
TRAINING = sorted((ROOT / "examples" / "train").glob("*.yaml"))


def test_quickstart(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", str(ROOT / "examples" / "quickstart.sh"), str(tmp_path / "out")],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "no deadlock" in done.stdout
    for name in ("plan.json", "next.json"):
        assert check_plan(load_plan(tmp_path / "out" / name)) == []
    assert "llama-3.2-1b on small-mixed" in (tmp_path / "out" / "plan.html").read_text()
    assert "paid back after" in done.stdout
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.stem)
def test_training_files_can_be_read(path: Path) -> None:
    opening = [line for line in path.read_text(encoding="utf-8").splitlines() if line[:1] == "#"]
    assert any(line.startswith("# Needs:") for line in opening)
    assert any(line.startswith("# Run:") and f"examples/train/{path.name}" in line
               for line in opening)  # fmt: skip
    config = TrainConfig.load(path)
    assert load_cluster(config.cluster).pools
    folder = Path(config.model)
    if folder.exists():  # others are yours to download
        assert load_model(config.model).num_units > 2
    for source in config.data.train:  # what is named is there
        assert source.path.startswith("shipped:") or Path(source.path).exists()
