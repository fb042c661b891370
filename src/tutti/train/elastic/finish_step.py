"""A step that lost its peers when nothing but this rank's own work was left of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tutti.schedule.instruction import Lane
from tutti.train.engine.engine import Engine
from tutti.train.engine.step_totals import StepResult


def finish_step(engine: Engine, sums: Sequence[float] = ()) -> StepResult:
    """Finish it.

    `sums` are those of all ranks where this one has not heard them. What only travels to other
    ranks is left out: whoever goes on takes its state from the masters.
    """
    end = engine.end
    if end.pending:
        scalars = torch.tensor(sums, dtype=torch.float64, device=engine.accelerator.device)
        engine.take_sums(scalars)
    assert end.at is not None
    for entry in engine.instructions[end.at :]:
        if entry.lane is not Lane.NETWORK:
            engine.start(entry, engine.handlers[entry.op]).wait()
    return engine.ended()
