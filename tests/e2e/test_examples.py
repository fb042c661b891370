"""The scripts in examples/ run to the end; training files can be read and say how to run them."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
from pathlib import Path

import pytest

import tutti.hardware
from tests.support.warm_commands import path_of_shells
from tutti.models.load import load_model
from tutti.plan.check import check_plan
from tutti.plan.files import load_plan
from tutti.train.run.config import TrainConfig
from tutti.train.run.planning import cluster_of

ROOT = Path(__file__).parents[2]
TRAINING = sorted((ROOT / "examples" / "train").glob("*.yaml"))


@pytest.fixture
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the cluster that plays on a laptop with one chip of each kind: half the processes."""
    shipped = Path(tutti.hardware.__file__).parent / "catalog/clusters/laptop.yaml"
    lines = [line for line in shipped.read_text().splitlines() if "islands:" not in line]
    text = "\n".join(lines).replace("name: laptop\n", "name: pair\n")
    assert text.count("num_chips: 2") == 1
    path = tmp_path_factory.mktemp("clusters") / "pair.yaml"
    path.write_text(text.replace("num_chips: 2", "num_chips: 1"))
    return path


def test_quickstart(tmp_path: Path, pair: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    short = {
        "PORT": str(port),
        "STEPS": "3",
        "FEW": "2",
        "BUDGET": "4s",
        "BATCH": "4",
        "SEQUENCES": "48",
        "SPACE": "--tp-max 1 --schedule 1f1b --shard 1 --max-stages 2",
        "CLUSTER": str(pair),
    }
    done = subprocess.run(
        ["sh", str(ROOT / "examples" / "quickstart.sh"), str(tmp_path / "out")],
        cwd=tmp_path,
        env={**os.environ, "PATH": path_of_shells(), **short},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    out = tmp_path / "out"
    for name in ("plan.json", "next.json", "planned/plan.json", "uniform/plan.json"):
        assert check_plan(load_plan(out / name)) == []
    assert "llama-3.2-1b on small-mixed" in (out / "plan.html").read_text()
    assert "paid back after" in done.stdout
    assert "planned" in (out / "report.html").read_text()
    assert '"heat/0"' in (out / "dashboard.html").read_text()
    assert "a rehearsal: eight emulated chips" in done.stdout  # found, unless the machine is busy
    assert "Once upon a time│" in done.stdout
    for name in ("fast", "slow"):
        learnt = json.loads((out / f"{name}.json").read_text())
        assert learnt["chip"] == f"CPU-{name}"
        assert re.search(rf"by step [3-6] of a run of small-llama on {name}:", learnt["origin"])
    losses = {
        name: [
            json.loads(line)["loss"]
            for line in (out / name / "metrics.jsonl").read_text().splitlines()
            if "validation_loss" not in line
        ]
        for name in ("planned", "uniform")
    }
    assert losses["planned"][:2] == pytest.approx(losses["uniform"], rel=1e-5)
    assert losses["planned"][-1] < losses["planned"][0]
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.stem)
def test_training_files_can_be_read(path: Path) -> None:
    opening = [line for line in path.read_text(encoding="utf-8").splitlines() if line[:1] == "#"]
    assert any(line.startswith("# Needs:") for line in opening)
    assert any(line.startswith("# Run:") and f"examples/train/{path.name}" in line
               for line in opening)  # fmt: skip
    config = TrainConfig.load(path)
    assert cluster_of(config).pools
    folder = Path(config.model)
    if folder.exists():  # others are yours to download
        assert load_model(config.model).num_units > 2
    for source in config.data.train:  # what is named is there
        assert source.path.startswith("shipped:") or Path(source.path).exists()


def commands_of(path: Path) -> list[str]:
    """Return what a training file's opening says to type: `# Plan:` and `# Run:`, in order."""
    opening = path.read_text(encoding="utf-8").replace("\\\n#", " ").splitlines()
    return [line.split(":", 1)[1].strip() for line in opening if re.match("# (Plan|Run):", line)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["laptop", "torchrun"])
def test_training_files_run_as_they_say(name: str, tmp_path: Path) -> None:
    """Only shorter, and elsewhere; the others need a model that does not ship."""
    pytest.importorskip("torch")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    *before, last = commands_of(ROOT / "examples" / "train" / f"{name}.yaml")
    for command in (*before, f"{last} --steps 2"):
        done = subprocess.run(
            ["sh", "-c", command],
            cwd=tmp_path,
            env={**os.environ, "PATH": path_of_shells()},
            capture_output=True,
            text=True,
            timeout=800,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    figures = (tmp_path / "out" / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in figures]
    assert [step["step"] for step in steps if "loss" in step] == [1, 2]
    assert sum(pool["ranks"] for pool in steps[0]["pools"].values()) == 4
    assert (tmp_path / "out" / name / "huggingface" / "config.json").is_file()
