"""Engines on models that are in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tutti.accelerator.devices.cpu import CpuAccelerator
from tutti.nn import Model
from tutti.serve import Engine
from tutti.serve.drafting import NgramDrafter
from tutti.serve.loading import Sizes, settings_for
from tutti.serve.worker import Worker


class RepeatingCpu(CpuAccelerator):
    """A host whose graphs are the captured functions themselves."""

    def graph_pool(self) -> object:
        return self

    def capture(
        self, function: Callable[[], Any], *, pool: object | None = None, warm_ups: int = 3
    ) -> Callable[[], Any]:
        del pool
        for _ in range(warm_ups + 1):
            function()
        return function


def engine_with_graphs(model: Model, **options: Any) -> Engine:
    """Return an engine that runs every step it can as a graph, one step late."""
    accelerator = RepeatingCpu()
    dtype = next(model.parameters()).dtype
    settings = settings_for(model.spec, Sizes(**options), accelerator, dtype, model)
    worker = Worker(model, accelerator, settings, dtype=dtype)
    worker._capturable = True  # the host's attention reads lengths, which these graphs allow
    return Engine(worker)


def engine_of(
    model: Model,
    end: tuple[int, ...] = (),
    tokenizer: Any = None,
    guesses: int = 0,
    **options: Any,
) -> Engine:
    accelerator = CpuAccelerator()
    dtype = next(model.parameters()).dtype
    sizes = Sizes(**options)
    settings = settings_for(model.spec, sizes, accelerator, dtype, model)
    worker = Worker(model, accelerator, settings, dtype=dtype, codes=sizes.codes, end=end)
    drafter = NgramDrafter(shortest=1) if guesses else None
    return Engine(worker, tokenizer=tokenizer, drafter=drafter, guesses=guesses)
