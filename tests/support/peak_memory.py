"""The peak memory of every rank of a plan, with ranks as threads, and what is predicted of it."""

from __future__ import annotations

import gc
from typing import Any

from tests.support.threads import World
from tests.support.training import batches_of, engine_of, settings
from tutti.accelerator.devices.cpu import CpuAccelerator
from tutti.cost.memory.instruction_memory import Overheads
from tutti.cost.plan.sources import Sources
from tutti.plan.plan import Plan
from tutti.ranks.rank_places import class_of
from tutti.simulate.estimate import estimate
from tutti.train.engine.unit_memory import EVERYTHING, BalancedOperators, measure_ranks

NO_OVERHEADS = Overheads(context_bytes=0.0, workspace_bytes=0.0, slack=0.0)


def measured_peaks(plan: Plan, *, balanced: bool = False) -> list[tuple[int, int]]:
    """Return the class of every rank, and its peak in the second step.

    With `balanced` routers give each expert as many tokens, as predictions assume.
    """

    def one(links: Any) -> tuple[int, int]:
        accelerator = CpuAccelerator()
        if balanced:
            accelerator.operators = BalancedOperators(accelerator.operators)  # type: ignore[assignment]
        accelerator.limit_memory(EVERYTHING)
        try:
            engine = engine_of(plan, plan.model.spec, links, accelerator=accelerator)
            engine.step(batches_of(engine, 0), settings())
            gc.collect()
            accelerator.reset_peak()
            engine.step(batches_of(engine, 1), settings())
            return class_of(engine.schedule, engine.seat), accelerator.memory().peak
        finally:
            accelerator.limit_memory(None)

    gc.collect()
    gc.freeze()  # what ranks collect is of their own making; all of a session takes seconds
    return World(plan.num_ranks).run(one)


def peak_errors(plan: Plan, *, balanced: bool = False) -> dict[int, float]:
    """Return by how much the predicted peak of each class is off that of its fullest rank."""
    measured: dict[int, int] = {}
    for index, peak in measured_peaks(plan, balanced=balanced):
        measured[index] = max(measured.get(index, 0), peak)
    ranks = measure_ranks(plan, plan.model.spec, CpuAccelerator())
    sources = Sources(overheads=NO_OVERHEADS, measured_ranks=ranks)
    result = estimate(plan, sources=sources).result
    return {
        index: result.classes[index].peak_bytes / peak - 1.0 for index, peak in measured.items()
    }
