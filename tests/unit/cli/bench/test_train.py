"""`tutti bench train`: what a device cannot hold is refused before anything is made."""

from __future__ import annotations

import dataclasses

import pytest

from tutti.accelerator import open_accelerator
from tutti.accelerator.accelerator import MemoryUse
from tutti.bench.train_speed import SpeedQuestion, our_speed
from tutti.bench.train_types import one_of_each_type
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
    assert len(types) == len(found) == 39
    assert (types["llama"].model, types["llama"].layers) == ("llama-3.2-1b", None)
    assert types["mixtral"].model == "mixtral-8x7b"
    assert (types["gpt2"].micro_batch, types["gpt2"].sequence_length) == (8, 1024)
    for each in found:
        assert each.layers == 1 or each.spec().num_parameters <= 4e9, each.model
        if each.layers is not None:  # one more would be too much
            more = dataclasses.replace(each, layers=each.layers + 1)
            assert more.spec().num_parameters > 4e9, each.model
