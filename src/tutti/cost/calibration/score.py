"""Scores of predictions against measured runs, per group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tutti.cost.arrays import FloatArray
from tutti.cost.calibration.baseline import constant_utilisation_pct, errors_pct
from tutti.cost.calibration.runs import Run
from tutti.cost.calibration.table import Rows, RunTable
from tutti.cost.memory.footprint import EAGER_LOGIT_BYTES, LOGIT_BYTES, footprint

# A group is a grid of strategies where most of its rows compete with others for one problem.
_LEAST_CHOICES = 2
_LEAST_SHARE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupScore:
    """How far predictions of a group are off. Percent; None where it has no meaning."""

    rows: int
    scored: int
    mape_pct: float | None = None
    median_pct: float | None = None
    worst_pct: float | None = None
    constant_mape_pct: float | None = None
    memory_mape_pct: float | None = None
    spearman: float | None = None
    regret_pct: float | None = None
    worst_row: str | None = None
    inside_pct: float | None = None  # rows in their 10–90 % intervals


class Scoreboard:
    """Collects predictions of held-out rows, over all splits, and averages them by row."""

    def __init__(self, table: RunTable) -> None:
        self._table = table
        self._errors = np.zeros(len(table))
        self._logs = np.zeros(len(table))
        self._counts = np.zeros(len(table))
        self._regrets: dict[str, list[float]] = defaultdict(list)
        self._inside: dict[int, bool] = {}

    def add(self, rows: Rows, predicted: FloatArray) -> None:
        """Add the predictions of some rows."""
        measured = self._table.measured[rows]
        self._errors[rows] += errors_pct(predicted, measured)
        self._logs[rows] += np.log(predicted / measured)
        self._counts[rows] += 1
        runs = [self._table.runs[i] for i in rows]
        for group, lost in regrets(runs, predicted, measured).items():
            self._regrets[group] += lost

    def add_half_widths(self, rows: Rows, predicted: FloatArray, widths: Sequence[float]) -> None:
        """Add how far predictions of some rows are expected to be off."""
        off = np.abs(np.log(predicted / self._table.measured[rows]))
        self._inside |= dict(zip(rows.tolist(), (off <= np.array(widths)).tolist(), strict=True))

    def score(self, group: str, num_rows: int) -> GroupScore:
        """Return the score of a group that has `num_rows` in the file, usable or not."""
        here = [i for i, run in enumerate(self._table.runs) if run.group == group]
        rows = np.array([i for i in here if self._counts[i]], dtype=np.intp)
        if not len(rows):
            return GroupScore(rows=num_rows, scored=0)
        table = self._table.take(rows)
        errors = self._errors[rows] / self._counts[rows]
        predicted = table.measured * np.exp(self._logs[rows] / self._counts[rows])
        worst = int(np.argmax(errors))
        inside = [self._inside[i] for i in rows.tolist() if i in self._inside]
        sign = "+" if predicted[worst] > table.measured[worst] else "−"
        return GroupScore(
            rows=num_rows,
            scored=len(rows),
            mape_pct=float(errors.mean()),
            median_pct=float(np.median(errors)),
            worst_pct=float(errors.max()),
            constant_mape_pct=constant_utilisation_pct(table.ideal_seconds, table.measured),
            memory_mape_pct=memory_mape_pct(table),
            spearman=_spearman(predicted, table.measured),
            regret_pct=self._regret(group, table.runs),
            worst_row=f"{table.runs[worst].id} {sign}",
            inside_pct=100.0 * float(np.mean(inside)) if inside else None,
        )

    def _regret(self, group: str, runs: Sequence[Run]) -> float | None:
        losses = self._regrets[group]
        choices: dict[tuple[str, ...], list[Run]] = defaultdict(list)
        for run in runs:
            choices[run.choice].append(run)
        contested = [len(rivals) for rivals in choices.values() if _differ(rivals)]
        if len(contested) < _LEAST_CHOICES or sum(contested) < _LEAST_SHARE * len(runs):
            return None
        return float(np.mean(losses)) if losses else None


def _differ(runs: Sequence[Run]) -> bool:
    """Tell whether there is a choice: repeats of one strategy are none."""
    return any(run.strategy != runs[0].strategy for run in runs[1:])


def regrets(
    runs: Sequence[Run], predicted: FloatArray, measured: FloatArray
) -> dict[str, list[float]]:
    """Return by group how much slower the chosen strategy is than the best one, in percent."""
    members: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for i, run in enumerate(runs):
        members[run.choice].append(i)
    lost_by_group: dict[str, list[float]] = defaultdict(list)
    for rows in members.values():
        if _differ([runs[i] for i in rows]):
            chosen = rows[int(np.argmin(predicted[rows]))]
            lost = 100.0 * (measured[chosen] / measured[rows].min() - 1.0)
            lost_by_group[runs[rows[0]].group].append(float(lost))
    return lost_by_group


def memory_mape_pct(table: RunTable) -> float | None:
    """Return the mean error of the predicted peak memory, where it was measured."""
    rows = [i for i, run in enumerate(table.runs) if run.memory_bytes is not None]
    if not rows:
        return None
    table = table.take(np.array(rows, dtype=np.intp))
    sources = [run.source for run in table.runs]
    memory = footprint(
        table.shape,
        table.strategy,
        state_bytes=np.array([s.state_bytes for s in sources]),
        logit_bytes=np.array([EAGER_LOGIT_BYTES if s.eager_loss else LOGIT_BYTES for s in sources]),
    )
    whole = np.array([s.process_memory for s in sources])
    predicted = np.where(whole, memory.of_process(), memory.total_bytes)
    measured = np.array([run.memory_bytes or 0.0 for run in table.runs])
    return float(errors_pct(predicted, measured).mean())


def _spearman(first: FloatArray, second: FloatArray) -> float | None:
    """Return the rank correlation; None for fewer than three rows or equal ones."""
    from scipy.stats import rankdata

    if len(first) < 3 or np.ptp(first) == 0 or np.ptp(second) == 0:
        return None
    return float(np.corrcoef(rankdata(first), rankdata(second))[0, 1])
