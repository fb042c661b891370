"""A small training job as a user would type it: two emulated chips, a tiny model, a few steps."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.launching import plan_of
from tutti.cli.main import run
from tutti.hardware.cluster import Cluster
from tutti.models.load import load_model
from tutti.plan.chips import ChipSet
from tutti.plan.files import save_plan
from tutti.plan.plan import Replica

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 320,
    "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}  # fmt: skip
CONFIG = """
model: model
plan: plan.json
steps: 4
data: {train: ["shipped:tales"], tokenizer: bytes, holdout: 0.05, cache: cache}
optimizer: {learning_rate: 5e-3, schedule: constant}
output: out
"""
TUTTI = [sys.executable, "-m", "tutti.cli.main"]
Capture = pytest.CaptureFixture[str]


def write_job(folder: Path) -> Path:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    cluster, spec = Cluster.load("laptop"), load_model(str(folder / "model"))
    chips = [[Replica(chips=ChipSet.of("fast/0/0"))], [Replica(chips=ChipSet.of("fast/0/1"))]]
    save_plan(plan_of(cluster, chips, spec), folder / "plan.json")
    together = [[Replica(chips=ChipSet.of("fast/0/0-1"), count=2)]]
    larger = plan_of(cluster, together, spec)
    save_plan(larger, folder / "larger.json")
    pipeline = replace(larger.pipelines[0], micro_batches=1)
    job = replace(larger.job, global_batch=2)
    save_plan(replace(larger, pipelines=(pipeline,), job=job), folder / "other.json")
    (folder / "train.yaml").write_text(CONFIG, encoding="utf-8")
    return folder


def tutti(capsys: Capture, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        run(arguments)
    out, err = capsys.readouterr()
    return int(stopped.value.code or 0), out, err
