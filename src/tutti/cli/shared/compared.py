"""A real step beside the simulated one, as a table and as plain values."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tutti.schedule.instruction import Lane
from tutti.simulate.compare import compare_kinds, compare_parts
from tutti.units import seconds_text

if TYPE_CHECKING:
    from rich.table import Table

    from tutti.simulate.measured import MeasuredStep
    from tutti.simulate.result import SimulationResult


def kinds_table(result: SimulationResult, step: MeasuredStep) -> Table:
    """Return seconds per kind of instruction, of a mean rank."""
    from rich import box
    from rich.table import Table

    real, simulated = step.step_seconds, result.step_seconds
    emulated = ", emulated" if step.emulated else ""
    table = Table(
        title=f"step {step.step}{emulated}: {seconds_text(real)}, "
        f"simulated {seconds_text(simulated)} (real ÷ simulated {real / simulated:.3f})",
        box=box.SIMPLE_HEAD,
        caption="mean of all ranks; off the compute lane: while at least one was under way, "
        "waiting included",
    )
    for name in ("instruction", "lane", "predicted", "measured", "ratio", "compute waited"):
        table.add_column(name, justify="left" if name in ("instruction", "lane") else "right")
    for kind in compare_kinds(result, step):
        table.add_row(
            kind.op.value,
            kind.lane.value,
            seconds_text(kind.predicted_s),
            seconds_text(kind.measured_s),
            "–" if kind.ratio is None else f"{kind.ratio:.3f}",
            "" if kind.lane is Lane.COMPUTE else seconds_text(kind.waited_s),
        )
    return table


def kinds_document(result: SimulationResult, step: MeasuredStep) -> dict[str, Any]:
    """Return the comparison as plain values."""
    return {
        "step": step.step,
        "emulated": step.emulated,
        "measured_s": step.step_seconds,
        "simulated_s": result.step_seconds,
        "kinds": [{**asdict(kind), "op": kind.op.value} for kind in compare_kinds(result, step)],
        "pools": [asdict(pool) for pool in compare_parts(result, step)],
    }
