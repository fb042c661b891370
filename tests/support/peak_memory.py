"""The peak memory of every rank of a plan, with ranks as threads, and what is predicted of it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

from tests.support.threads import World
from tests.support.training import batches_of, engine_of, settings
from tutti.accelerator.devices.cpu import CpuAccelerator
from tutti.cost.kernels import Kernels
from tutti.cost.memory.instruction_memory import Overheads
from tutti.cost.memory.measured_passes import MeasuredMemory
from tutti.cost.memory.rank_state import RankState
from tutti.cost.plan.sources import Sources
from tutti.plan.plan import Plan
from tutti.ranks.rank_places import Seats, class_of
from tutti.schedule.instruction import Instruction
from tutti.schedule.schedule import build_schedule
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


def levels_after(plan: Plan) -> dict[int, list[tuple[Instruction, int, float]]]:
    """Return, by rank, what lies on its chip after each instruction as issued, and as predicted.

    The predicted ones are of its class, whose fullest rank it may not be.
    """
    gc.collect()
    gc.freeze()
    schedule, seats = build_schedule(plan), Seats(plan, plan.model.spec)
    ranks = measure_ranks(plan, plan.model.spec, CpuAccelerator())
    one_at_a_time = threading.Lock()

    def one(links: Any) -> list[int]:
        accelerator = CpuAccelerator()
        accelerator.operators = BalancedOperators(accelerator.operators)  # type: ignore[assignment]
        accelerator.limit_memory(EVERYTHING)
        levels: list[int] = []

        def around(entry: Instruction, run: Callable[[], Any]) -> Any:
            handle = run()
            with one_at_a_time:  # a collection that meets another one does nothing
                gc.collect()
            levels.append(accelerator.memory().allocated)
            return handle

        try:
            engine = engine_of(plan, plan.model.spec, links, accelerator=accelerator)
            engine.step(batches_of(engine, 0), settings())
            gc.collect()
            engine.around = around
            engine.step(batches_of(engine, 1), settings())
            return levels
        finally:
            accelerator.limit_memory(None)

    gc.disable()
    try:
        measured_levels = World(plan.num_ranks).run(one)
    finally:
        gc.enable()
    found = {}
    for rank, levels in enumerate(measured_levels):
        rank_class = schedule.classes[class_of(schedule, seats[rank])]
        place = (rank_class.pipeline, rank_class.stage, rank_class.replica)
        memory = MeasuredMemory(RankState(plan, plan.model.spec, place, Kernels()), ranks[place])
        memory.begin()
        level, rows = memory.static().total, []
        for index, (entry, measured) in enumerate(
            zip(rank_class.instructions, levels, strict=True)
        ):
            level += memory.change(entry, index).left
            rows.append((entry, measured, level))
        found[rank] = rows
    return found
