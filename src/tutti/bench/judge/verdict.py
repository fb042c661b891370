"""What the rows of drawn questions say together, beside what is asked of the planner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
NOTHING_PCT = 0.01  # a gain below this is none
FORM_PCT = 0.3  # what another form of a question may change
MORE_PCT = 0.2  # what more may cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The figures of all rows; shares in percent of the questions that have a plan."""

    questions: int
    unanswered: int
    nothing_pct: float  # of them single changes gain nothing
    within_1_pct: float
    worst_gain_pct: float
    worst_form_pct: float
    worst_more_pct: float
    forms_apart: int  # questions of which a form differs by more than it may
    more_worse: int
    below_bound: int

    @property
    def passes(self) -> bool:
        """Whether the planner meets every bar."""
        return (
            self.nothing_pct >= 80.0
            and self.within_1_pct >= 95.0
            and self.worst_gain_pct <= 2.0
            and not self.forms_apart
            and not self.more_worse
            and not self.below_bound
        )

    def lines(self) -> list[str]:
        """Return the figures in words, with their bars."""
        return [
            f"single changes gain nothing on {self.nothing_pct:.0f} % (bar: 80), at most 1 % on "
            f"{self.within_1_pct:.0f} % (95), {self.worst_gain_pct:.2f} % at most (2)",
            f"order, names and splitting change {self.worst_form_pct:.2f} % at most (0.3); more "
            f"on {self.forms_apart} of {self.questions}",
            f"more costs {self.worst_more_pct:.2f} % at most (0.2); more on {self.more_worse}",
            f"plans below their bound: {self.below_bound}; without an answer: {self.unanswered}",
        ]


def verdict_of(rows: Sequence[Row]) -> Verdict:
    """Return the figures of some rows."""
    answered = [row for row in rows if "why" not in row]
    gains = [row["gain_pct"] for row in answered]
    forms = [_worst(row["forms_pct"], both_ways=True) for row in answered]
    mores = [_worst(row["more_pct"], both_ways=False) for row in answered]
    share = 100.0 / max(1, len(answered))
    return Verdict(
        questions=len(rows),
        unanswered=len(rows) - len(answered),
        nothing_pct=share * sum(gain < NOTHING_PCT for gain in gains),
        within_1_pct=share * sum(gain <= 1.0 for gain in gains),
        worst_gain_pct=max(gains, default=0.0),
        worst_form_pct=max(forms, default=0.0),
        worst_more_pct=max(mores, default=0.0),
        forms_apart=sum(worst > FORM_PCT for worst in forms),
        more_worse=sum(worst > MORE_PCT for worst in mores),
        below_bound=sum(bool(row["below_bound"]) for row in answered),
    )


def _worst(changes: Mapping[str, float | None], *, both_ways: bool) -> float:
    """Return the largest change; a plan that is lost counts as endless."""
    worst = 0.0
    for change in changes.values():
        if change is None:
            return float("inf")
        worst = max(worst, abs(change) if both_ways else change)
    return worst
