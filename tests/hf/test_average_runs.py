"""Whole runs with a mean of weights: saved, resumed, left as a folder, under several plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.support.hf_models import saved, tiny_model  # noqa: E402
from tests.support.tiny_configs import tiny_config  # noqa: E402
from tutti.errors import InputError  # noqa: E402
from tutti.huggingface import open_checkpoint  # noqa: E402
from tutti.train.run.trainer import Trainer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def trainer(folder: Path, output: Path, **more: Any) -> Trainer:
    return Trainer.from_pretrained(
        folder,
        start="pretrained",
        output=str(output),
        data={"train": [{"kind": "synthetic"}], "cache": str(output.parent / "cache")},
        job={"global_batch": 4, "sequence_length": 16, "precision": "fp32"},
        checkpoints={"every": 2},
        optimizer={"learning_rate": 1e-2, "schedule": "constant"},
        **{"average": {"decay": 0.5}, "ranks": 1, **more},
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_mean_of_a_resumed_run_is_that_of_the_run(tmp_path: Path) -> None:
    folder = saved(tiny_model(tiny_config("llama/gqa")), tmp_path / "model")
    trainer(folder, tmp_path / "parts", ranks=2).fit(steps=2)
    trainer(folder, tmp_path / "parts", ranks=2).fit(steps=4, resume=True)
    trainer(folder, tmp_path / "whole").fit(steps=4)
    found = open_checkpoint(tmp_path / "parts" / "averaged")
    expected = open_checkpoint(tmp_path / "whole" / "averaged")
    last = open_checkpoint(tmp_path / "whole" / "huggingface")
    for name in expected.names():
        torch.testing.assert_close(found.read(name), expected.read(name), atol=1e-5, rtol=1e-5)
    assert any(not torch.equal(expected.read(n), last.read(n)) for n in expected.names())
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "parts" / "averaged")


def test_what_no_mean_is_kept_of_is_refused(tmp_path: Path) -> None:
    folder = saved(tiny_model(tiny_config("llama/gqa")), tmp_path / "model")
    with pytest.raises(InputError, match="of adapters no mean is kept"):
        trainer(folder, tmp_path / "a", tuning={"adapter": {"rank": 2}}).prepare()
    with pytest.raises(InputError, match="'elastic' and 'average'"):
        trainer(folder, tmp_path / "a", elastic={})
