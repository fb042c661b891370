"""`tutti bench train`: what a device cannot hold is refused before anything is made."""

from __future__ import annotations

import pytest

from tutti.accelerator import open_accelerator
from tutti.accelerator.accelerator import MemoryUse
from tutti.bench.train_speed import SpeedQuestion, our_speed
from tutti.errors import InputError


def test_a_model_that_memory_does_not_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    chip = type(open_accelerator("cpu"))
    total = 2 << 30
    monkeypatch.setattr(chip, "memory", lambda self: MemoryUse(total=total, allocated=0, peak=0))
    asked = SpeedQuestion(
        model="llama-3.2-1b", device="cpu", micro_batch=1, sequence_length=64, layers=None,
        precision="pure_bf16", steps=1,
    )  # fmt: skip
    with pytest.raises(InputError, match=r"takes 9\.[0-9] GiB at least, but CPU has 2\.0 GiB"):
        our_speed(asked, lambda text: None)
