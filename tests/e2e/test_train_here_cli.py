"""`tutti train FOLDER --ranks 2`: this machine as it is, what is said beforehand, and trackers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tutti.diagnose.runs.folder import diagnose_run
from tutti.hardware.discover import find_devices, run_tool
from tutti.hardware.local import has_bf16
from tutti.observe.ring import Kind, read_rings
from tutti.observe.ring_export import spans

pytest.importorskip("torch")

MODEL = {
    "model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 259,
    "n_positions": 64,
}  # fmt: skip
WANDB = """
import json
from types import SimpleNamespace

def init(*, project, name, dir, mode, id, resume, config):
    file = open(f"{dir}/wandb.jsonl", "a")
    say = lambda **values: print(json.dumps(values), file=file, flush=True)
    say(project=project, mode=mode, ranks=config["ranks"])
    return SimpleNamespace(
        id=id or "one", log=lambda values, step: say(step=step, loss=values.get("loss")),
        finish=lambda: say(end=True),
    )
"""


@pytest.mark.skipif(bool(find_devices(run_tool)), reason="an accelerator would be taken")
def test_two_processes_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny/config.json").write_text(json.dumps(MODEL))
    (tmp_path / "wandb.py").write_text(WANDB)
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    away = ("TUTTI_DEVICE", "RANK", "WORLD_SIZE")
    done = subprocess.run(
        [
            sys.executable, "-m", "tutti.cli.main", "train", "tiny", "--ranks", "2",
            "--data", "shipped:tales", "--steps", "2", "-o", "out",
            "--set", "data.tokenizer=bytes", "--set", "data.cache=cache",
            "--set", "job.sequence_length=32", "--set", "job.global_batch=4",
            "--set", "measure.wandb=mixed", "--set", "checkpoints.final=false",
            "--set", "checkpoints.huggingface=false",
        ],
        capture_output=True, text=True, timeout=800, cwd=tmp_path,
        env={**{k: v for k, v in os.environ.items() if k not in away}, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "2 steps, loss " in done.stdout
    plan = json.loads((tmp_path / "out/plan.json").read_text())
    assert {log.name for log in (tmp_path / "out/logs").iterdir()} == {"rank-0.log", "rank-1.log"}
    assert plan["cluster"]["name"] == "here"
    lines = done.stderr.splitlines()
    assert sum("is not applied: tutti trains without" in line for line in lines) == 1
    assert any(line.startswith("precision: fp32, for this machine") for line in lines) is (
        not has_bf16()
    )
    told = [json.loads(line) for line in (tmp_path / "out/wandb.jsonl").read_text().splitlines()]
    assert told[0] == {"project": "mixed", "mode": "offline", "ranks": 2}
    metrics = (tmp_path / "out/metrics.jsonl").read_text().splitlines()
    assert told[1:-1] == [
        {"step": row["step"], "loss": row["loss"]} for row in map(json.loads, metrics)
    ]
    assert told[-1] == {"end": True}
    rings, notes = read_rings(tmp_path / "out/rings")
    assert ([ring.rank for ring in rings], notes) == ([0, 1], [])
    for ring in rings:  # every event of both steps, and nothing is left open
        assert ring.events[-1].kind is Kind.STEP_END
        assert {event.step for event in ring.events} == {1, 2}
        assert all(span.end_ns is not None for span in spans(ring))
    stores = sorted(path.name for path in (tmp_path / "out" / "series").glob("*.sqlite"))
    assert stores == ["cpu-0.sqlite", "ranks.sqlite"], "one of the host, one of the ranks"
    assert diagnose_run(tmp_path / "out").healthy
