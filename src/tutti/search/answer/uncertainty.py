"""What the error bars of predictions say of a plan: how long its step may be, and what ties."""

from __future__ import annotations

from collections.abc import Iterator

from tutti.cost.calibration.intervals import shipped_widths
from tutti.search.answer.explanation import step_text
from tutti.search.answer.result import Objective, ProvenPlan, SearchResult


def interval_text(proven: ProvenPlan) -> str:
    """Return "2.1 s to 2.9 s": what 8 of 10 measured steps lie within."""
    low, high = proven.estimate.interval
    return f"{step_text(low)} to {step_text(high)}"


def ties(result: SearchResult) -> Iterator[str]:
    """Yield which of the compared plans might as well be the faster ones."""
    if result.objective is not Objective.STEP_TIME:
        return
    rivals = {"the runner-up": result.runner_up, "the best uniform plan": result.uniform}
    tied = [
        name for name, proven in rivals.items()
        if proven is not None and not result.best.is_told_apart(proven)
    ]  # fmt: skip
    if tied:
        widest = shipped_widths().pair * max(
            proven.estimate.half_width
            for name, proven in rivals.items()
            if proven is not None and name in tied
        )
        yield (
            f"This plan and {' and '.join(tied)} cannot be told apart: in 2 of 10 cases the ratio "
            f"of two predictions for one job is off by more than {100 * widest:.0f} %."
        )
