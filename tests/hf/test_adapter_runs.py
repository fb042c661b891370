"""Whole runs with adapters: processes, checkpoints, a resume, the folders they leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from tests.support.peft_runs import folder_of  # noqa: E402
from tutti.errors import InputError  # noqa: E402
from tutti.train.run.result import TrainResult  # noqa: E402
from tutti.train.run.trainer import Trainer  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore"),  # of peft, about transformers
]
ADAPTER = {"rank": 4, "alpha": 8}


def run(folder: Path, output: Path, steps: int, tuning: dict[str, Any], **fit: Any) -> TrainResult:
    trainer = Trainer.from_pretrained(
        folder,
        ranks=2,
        start="pretrained",
        steps=steps,
        output=str(output),
        data={"train": [{"kind": "synthetic"}], "cache": str(output.parent / "cache")},
        job={"global_batch": 4, "sequence_length": 16, "precision": "fp32"},
        tuning=tuning,
        checkpoints={"every": 2, "merged": True},
        optimizer={"learning_rate": 1e-2, "schedule": "constant"},
    )
    return trainer.fit(**fit)


@pytest.mark.parametrize("base", ["wide", "nf4"])
def test_a_resumed_run_is_the_run_and_its_folders_load(base: str, tmp_path: Path) -> None:
    folder = folder_of("llama/gqa", tmp_path / "model")
    tuning = {"adapter": ADAPTER, "base": base}
    first = run(folder, tmp_path / "run", 4, tuning)
    assert first.adapter is not None
    assert first.checkpoint is not None
    saved = sum(p.stat().st_size for p in first.checkpoint.rglob("*.tutti"))
    weights = (folder / "model.safetensors").stat().st_size
    assert saved < weights, "a checkpoint holds what is trained"
    again = run(folder, tmp_path / "run", 6, tuning, resume=True)
    whole = run(folder, tmp_path / "other", 6, tuning)
    assert again.losses == whole.losses[4:]
    assert again.adapter is not None
    assert again.huggingface is not None
    tokens = torch.arange(12).view(1, 12)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(plain, str(again.adapter))
    merged = transformers.AutoModelForCausalLM.from_pretrained(
        again.huggingface, dtype=torch.float32
    )
    with torch.no_grad():
        found, expected = (model(input_ids=tokens).logits for model in (merged, loaded))
    assert (found - expected).abs().max() < 1e-5
    with pytest.raises(InputError, match="is of another model: 'tuning"):
        run(folder, tmp_path / "run", 8, {"adapter": {**ADAPTER, "rank": 8}}, resume=True)
