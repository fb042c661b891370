"""`tutti train` under the generated files: two "nodes" of two ranks, two pools, one restart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.dist.launch.rehearsal import TRAIN, crossed_pair, files_of, run_files
from tutti.bench.emulated_network import why_not
from tutti.models.load import load_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
CONFIG = """\
model: {model}
start: random
data: {{train: [{{kind: synthetic}}]}}
optimizer: {{learning_rate: 1e-2, schedule: constant}}
checkpoints: {{huggingface: false}}
output: out
timeout_s: 240
"""
# Two steps and a failure; two more steps after the restart.
FIRST_FAILS = """\
if [[ $TUTTI_ATTEMPT == 0 ]]; then
  "$@" --steps 2
  exit 1
fi
exec "$@" --steps 4
"""


def test_training_goes_on_after_a_restart(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "first_fails.sh").write_text(FIRST_FAILS)
    files = files_of(
        crossed_pair(model=load_model(str(model))),
        command=["bash", str(tmp_path / "first_fails.sh"), *TRAIN],
        config=CONFIG.format(model=model),
        restarts=1,
    )
    folder = tmp_path / "files"
    done = run_files(files, folder, timeout_s=800)
    assert done.status == 0, done.output
    assert "run.sh: restart 1 of 1" in done.output
    assert done.output.count("making random weights") == 1
    assert done.output.count("reading the checkpoint") == 1
    rows = [json.loads(line) for line in (folder / "out/metrics.jsonl").read_text().splitlines()]
    steps = [(row["step"], row["loss"]) for row in rows if "loss" in row and "step" in row]
    assert [step for step, _ in steps] == [1, 2, 3, 4]
    assert steps[-1][1] < steps[0][1]
    # activations, gradients and parameters crossed the wire between the pools
    assert min(done.sent_bytes["0/0"], done.sent_bytes["1/0"]) > 1_000_000
