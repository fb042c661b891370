"""`tutti bench train`: what a device cannot hold is refused before anything is made."""

from __future__ import annotations

import dataclasses

import pytest

from tutti.accelerator import open_accelerator
from tutti.accelerator.accelerator import MemoryUse
from tutti.bench.training.model_types import one_of_each_type, speeds_apart
from tutti.bench.training.question import SpeedQuestion
from tutti.bench.training.speed import our_speed
from tutti.errors import InputError


def test_a_model_that_memory_does_not_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    chip = type(open_accelerator("cpu"))
    total = 2 << 30
    monkeypatch.setattr(chip, "memory", lambda self: MemoryUse(total=total, allocated=0, peak=0))
    asked = SpeedQuestion(
        model="llama-3.2-1b", device="cpu", micro_batch=1, sequence_length=64, layers=None,
        precision="pure_bf16", steps=1,
    )  # fmt: skip
    with pytest.raises(InputError, match=r"takes about 9\.[0-9] GiB, but CPU has 2\.0 GiB"):
        our_speed(asked, lambda text: None)


def test_one_model_of_each_type_with_the_layers_that_fit() -> None:
    asked = SpeedQuestion(
        model="", device=None, micro_batch=2, sequence_length=4096, layers=None,
        precision="pure_bf16", steps=1,
    )  # fmt: skip
    found = list(one_of_each_type(asked, 4e9))
    types = {each.config()["model_type"]: each for each in found}
    assert len(types) == len(found) == 43
    assert (types["llama"].model, types["llama"].layers) == ("llama-3.2-1b", None)
    assert types["mixtral"].model == "mixtral-8x7b"
    assert (types["gpt2"].micro_batch, types["gpt2"].sequence_length) == (8, 1024)
    for each in found:
        assert each.layers == 1 or each.spec().num_parameters <= 4e9, each.model
        if each.layers is not None:  # one more would be too much
            more = dataclasses.replace(each, layers=each.layers + 1)
            assert more.spec().num_parameters > 4e9, each.model


def question(model: str) -> SpeedQuestion:
    return SpeedQuestion(
        model=model, device="cpu", micro_batch=1, sequence_length=16, layers=1,
        precision="fp32", steps=1,
    )  # fmt: skip


def test_some_types_alone() -> None:
    found = list(one_of_each_type(question(""), 4e9, ["qwen3", "gpt2"]))
    assert {each.config()["model_type"] for each in found} == {"qwen3", "gpt2"}
    with pytest.raises(InputError, match="--types: 'qwen33'; did you mean 'qwen3'"):
        list(one_of_each_type(question(""), 4e9, ["qwen33"]))


@pytest.mark.slow
def test_types_are_timed_apart_and_one_that_fails_does_not_end_the_others() -> None:
    broken = dataclasses.replace(question("gpt2"), sequence_length=4096)  # it has 1,024 positions
    found = list(speeds_apart([broken, question("gpt2")], peers=False))
    assert [len(rows) for _, rows in found] == [1, 1]
    assert "1,024 learned positions" in found[0][1][0]["failed"]
    assert found[1][1][0]["step_s"] > 0
