"""A pipeline of unlike stages over four processes says what one process says."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from tests.support.gloo import GlooLinks, run_processes  # noqa: E402
from tests.support.packing import random_folder  # noqa: E402
from tests.support.serving_plans import placement  # noqa: E402
from tutti.accelerator.devices.cpu import CpuAccelerator  # noqa: E402
from tutti.models import read_config  # noqa: E402
from tutti.plan.plan import Plan  # noqa: E402
from tutti.serve import Engine, SamplingParameters  # noqa: E402
from tutti.serve.loading import Sizes  # noqa: E402
from tutti.serve.stages import open_stage  # noqa: E402

CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 67,
    "max_position_embeddings": 64,
}  # fmt: skip
PROMPTS = [[5, 9, 2, 40, 11], [7, 8], [3] * 9]
WISHES = [
    SamplingParameters(max_tokens=9, ignore_end=True),
    SamplingParameters(max_tokens=7, temperature=0.8, seed=3, n=2, ignore_end=True),
    SamplingParameters(max_tokens=8, repetition_penalty=1.3, ignore_end=True),
]
SIZES: dict[str, Any] = {"slots": 2, "page_size": 4, "pages": 16, "most_tokens": 6}


def plan() -> Plan:
    """One layer, then three on two ranks, then one with the head."""
    spec = read_config(CONFIG, "model")
    return placement(spec, ((0, 2), 1), ((2, 5), 2), ((5, 7), 1))


def tokens(engine: Engine) -> list[list[tuple[int, ...]]]:
    found = engine.generate(PROMPTS, WISHES)
    return [[answer.tokens for answer in done.answers] for done in found]


def serve(folder: Path, rank: int) -> list[list[tuple[int, ...]]]:
    worker = open_stage(
        folder, plan(), rank, GlooLinks(), CpuAccelerator(), sizes=Sizes(**SIZES)
    )  # fmt: skip
    answers = tokens(Engine(worker))
    worker.flush()  # nothing of the last step is lost with the process
    return answers


def test_stages_say_the_same(tmp_path: Path) -> None:
    folder = random_folder(tmp_path / "model", CONFIG)
    expected = tokens(Engine.from_pretrained(folder, dtype="fp32", **SIZES))
    assert len({token for done in expected for answer in done for token in answer}) > 5
    for found in run_processes(functools.partial(serve, folder), 4, tmp_path):
        assert found == expected
