"""Engines on models that are in memory."""

from __future__ import annotations

from typing import Any

from tutti.accelerator.devices.cpu import CpuAccelerator
from tutti.nn import Model
from tutti.serve import Engine
from tutti.serve.drafting import NgramDrafter
from tutti.serve.loading import Sizes, settings_for
from tutti.serve.worker import Worker


def engine_of(
    model: Model,
    end: tuple[int, ...] = (),
    tokenizer: Any = None,
    guesses: int = 0,
    **options: Any,
) -> Engine:
    accelerator = CpuAccelerator()
    dtype = next(model.parameters()).dtype
    settings = settings_for(model.spec, Sizes(**options), accelerator, dtype, model)
    worker = Worker(model, accelerator, settings, dtype=dtype, end=end)
    drafter = NgramDrafter(shortest=1) if guesses else None
    return Engine(worker, tokenizer=tokenizer, drafter=drafter, guesses=guesses)
