"""torchtitan as a peer: what it has no model for, and models of the size that was asked for."""

from __future__ import annotations

import pytest

from tutti.bench.training.question import SpeedQuestion
from tutti.bench.training.titan_peer import _llama, _qwen, titan_is_here, torchtitan_speed


def question(model: str, lora: int | None = None) -> SpeedQuestion:
    return SpeedQuestion(
        model=model, device="cpu", micro_batch=1, sequence_length=16, layers=1,
        precision="fp32", steps=1, lora=lora,
    )  # fmt: skip


def quiet(_text: str) -> None:
    """Say nothing."""


def test_a_type_that_it_has_no_model_for_is_a_row() -> None:
    row = torchtitan_speed(question("gpt2-xl"), quiet)
    assert row == {"who": "torchtitan", "failed": "has no gpt2 that is tried here"}


def test_adapters_are_a_row() -> None:
    row = torchtitan_speed(question("llama-3.2-1b", lora=8), quiet)
    assert row == {"who": "torchtitan", "failed": "trains no adapters"}


def test_who_is_not_installed_is_a_row() -> None:
    if titan_is_here():
        pytest.skip("torchtitan is installed")
    row = torchtitan_speed(question("llama-3.2-1b"), quiet)
    assert row == {"who": "torchtitan", "failed": "No module named 'torchtitan'"}


@pytest.mark.parametrize("model", ["llama-3-8b", "llama-3.2-1b", "qwen3-0.6b", "qwen3-30b-a3b"])
def test_its_model_has_our_number_of_parameters(model: str) -> None:
    pytest.importorskip("torchtitan", reason="torchtitan is not installed")
    import torch

    asked = question(model)
    with torch.device("meta"):
        made = (_llama if model.startswith("llama") else _qwen)(asked.config(), asked)
    assert sum(part.numel() for part in made.parameters()) == asked.spec().num_parameters
