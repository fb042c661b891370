"""Validation: predict every usable run out of sample, by shipped calibrations or by new fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tutti.cost.arrays import FloatArray
from tutti.cost.calibration.build import RANGED
from tutti.cost.calibration.fit import Predictor, fit
from tutti.cost.calibration.intervals import Known, shipped_widths
from tutti.cost.calibration.rows import KNOWN, Cells, Skipped
from tutti.cost.calibration.runs import Run
from tutti.cost.calibration.score import GroupScore, Scoreboard
from tutti.cost.calibration.shipped import Calibration, best_match, shipped_calibrations
from tutti.cost.calibration.splits import MOST_ROWS, held_out, num_splits, splits
from tutti.cost.calibration.stacks import Stack, stacks
from tutti.cost.calibration.table import Rows, RunTable, load_runs
from tutti.cost.constants import Constants
from tutti.cost.families import family_priors
from tutti.cost.step import price
from tutti.errors import InputError, hint

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A column that must have a value, such as hidden=1024."""

    column: str
    value: str

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Read "hidden=1024"."""
        column, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not value:
            raise InputError(f"--calibrate-on is '{text}'; write it like hidden=1024")
        if column not in KNOWN:
            raise InputError(f"--calibrate-on names column '{column}'; {hint(column, KNOWN)}")
        return cls(column=column, value=value)

    def holds(self, cells: Cells) -> bool:
        """Tell whether a row has the value, as text or as a number."""
        value = cells.text(self.column)
        try:
            return float(value) == float(self.value)
        except ValueError:
            return value == self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """Scores by group, and the rows that were left out with a reason each."""

    groups: dict[str, GroupScore]
    closed_form: dict[str, GroupScore]  # the same runs by the vectorised formulas alone
    skipped: list[Skipped]
    extrapolated: dict[str, int]  # scored rows outside the range of their calibration, by group


def validate(
    path: Path,
    *,
    group: str | None = None,
    calibrate: int | None = None,
    calibrate_on: Sequence[Condition] = (),
    predictor: Predictor | None = None,
    progress: Progress | None = None,
) -> Validation:
    """Predict the runs of a file and score them: by a predictor and by the vectorised formulas.

    Where constants are fitted anew, a run's prediction is that of the formulas times its ratio
    between the two under the constants that ship: a fit asks for thousands of predictions.
    """
    table, skipped, cells = load_runs(path)
    names = Counter(c.text("group") or "(none)" for c in cells)
    if group is not None and group not in names:
        raise InputError(f"{path}: has no group '{group}'; {hint(group, names)}")
    boards = Boards(Scoreboard(table), Scoreboard(table))
    outside: dict[str, int] = {}
    if calibrate is None and not calibrate_on:
        left_out, outside = _by_shipped(table, boards, group, predictor)
        skipped = skipped + left_out
    else:
        wanted = {c.text("id"): all(on.holds(c) for on in calibrate_on) for c in cells}
        allowed = [wanted[run.id] for run in table.runs] if calibrate_on else None
        work = _fits(table, allowed, group, predictor)
        _by_fits(table, boards, calibrate or MOST_ROWS, work, progress or silent)
    if predictor is not None:
        skipped = skipped + [Skipped(id=run, why=why) for run, why in predictor.refused.items()]
    shown = [group] if group is not None else list(names)
    of_group = {c.text("id"): c.text("group") or "(none)" for c in cells}
    return Validation(
        groups={name: boards.predicted.score(name, names[name]) for name in shown},
        closed_form={name: boards.closed_form.score(name, names[name]) for name in shown},
        skipped=[s for s in skipped if of_group.get(s.id) in shown],
        extrapolated={name: outside[name] for name in shown if name in outside},
    )


class Boards(NamedTuple):
    """Scores of the same runs, by the predictor and by the vectorised formulas."""

    predicted: Scoreboard
    closed_form: Scoreboard


# --- shipped calibrations --------------------------------------------------------------------


def _by_shipped(
    table: RunTable, boards: Boards, group: str | None, predictor: Predictor | None
) -> tuple[list[Skipped], dict[str, int]]:
    """Predict with what ships; rows that a calibration saw, and their cells, are left out."""
    used = {row for calibration in shipped_calibrations() for row in calibration.rows}
    seen = np.array([i for i, run in enumerate(table.runs) if run.id in used], dtype=np.intp)
    unseen = held_out(table, seen, range(len(table)))
    left_out = [
        Skipped(id=table.runs[i].id, why=_why_left_out(table.runs[i].id in used))
        for i in sorted(set(range(len(table))) - set(unseen.tolist()))
    ]
    outside: Counter[str] = Counter()
    wanted = [int(i) for i in unseen if group is None or table.runs[i].group == group]
    for rows in _by_constants(table, wanted):
        run = table.runs[rows[0]]
        calibration, here = calibration_of(run.group, run.chip), table.take(rows)
        closed = _closed_form(here, shipped_constants(run))
        boards.closed_form.add(rows, closed)
        predicted = predictor(here, shipped_constants(run)) if predictor is not None else closed
        known = np.isfinite(predicted)
        boards.predicted.add(rows[known], predicted[known])
        widths = [_half_width(calibration, table, run.group, int(i)) for i in rows[known]]
        boards.predicted.add_half_widths(rows[known], predicted[known], widths)
        if calibration is not None:
            outside[run.group] += sum(bool(_outside(calibration, table, int(i))) for i in rows)
    return left_out, {name: count for name, count in outside.items() if count}


def _by_constants(table: RunTable, rows: Sequence[int]) -> list[Rows]:
    """Return the rows that are priced by the same constants: those of one group and chip."""
    members: dict[tuple[str, str], list[int]] = {}
    for i in rows:
        members.setdefault((table.runs[i].group, table.runs[i].chip), []).append(i)
    return [np.array(rows, dtype=np.intp) for rows in members.values()]


def shipped_constants(run: Run) -> Constants:
    """Return the constants that ship for a run's group or chip; the priors where none do."""
    calibration = calibration_of(run.group, run.chip)
    if calibration is not None:
        return calibration.constants(run.group)
    return Constants(**{name: p.median for name, p in family_priors(run.chip).items()})


def _why_left_out(itself: bool) -> str:
    whom = "this row" if itself else "a row of the same cell"
    return f"a shipped calibration was fitted on {whom}"


def silent(done: int, total: int) -> None:
    """Show no progress."""
    del done, total


def calibration_of(group: str, chip: str) -> Calibration | None:
    """Return the shipped calibration for a run: that of its group, else the best for its chip."""
    shipped = shipped_calibrations()
    own = next((c for c in shipped if group in c.groups), None)
    return own or best_match(shipped, chip, None)


def _outside(calibration: Calibration, table: RunTable, row: int) -> tuple[str, ...]:
    return calibration.extrapolations(
        **{name: float(table.column(name)[row]) for name in calibration.ranges}
    )


def _half_width(calibration: Calibration | None, table: RunTable, group: str, row: int) -> float:
    """Return how far a prediction by a shipped calibration may be off."""
    known = Known.CHIP
    if calibration is not None and group in calibration.groups:
        known = Known.CLUSTER
    values = {name: float(table.column(name)[row]) for name in RANGED}
    return shipped_widths().half_width(calibration, known, values)


def _closed_form(table: RunTable, constants: Constants) -> FloatArray:
    return price(table.shape, table.strategy, table.machine, constants).step_seconds


# --- new fits --------------------------------------------------------------------------------


class _Fit(NamedTuple):
    """A stack to fit: its rows of the table, those that may calibrate, and a factor of each."""

    stack: Stack
    rows: Rows
    allowed: Rows | None
    ratio: FloatArray


def _fits(
    table: RunTable, allowed: list[bool] | None, group: str | None, predictor: Predictor | None
) -> list[_Fit]:
    """Return every stack (the one that has `group`) with what its predictions are times."""
    fits: list[_Fit] = []
    for stack, members in sorted_into_stacks(table):
        if group is not None and group not in {table.runs[i].group for i in members}:
            continue
        ratio = product_ratio(table.take(members), predictor)
        known = np.isfinite(ratio)
        members, ratio = members[known], ratio[known]
        chosen = None if allowed is None else np.flatnonzero([allowed[i] for i in members])
        fits.append(_Fit(stack, members, chosen, ratio))
    return fits


def product_ratio(table: RunTable, predictor: Predictor | None) -> FloatArray:
    """Return what a predictor says of runs over what the formulas say, as constants ship."""
    ratio = np.ones(len(table))
    if predictor is not None:
        for rows in _by_constants(table, range(len(table))):
            here = table.take(rows)
            constants = shipped_constants(here.runs[0])
            ratio[rows] = predictor(here, constants) / _closed_form(here, constants)
    return ratio


def _by_fits(
    table: RunTable, boards: Boards, most: int, work: Sequence[_Fit], progress: Progress
) -> None:
    """Fit and score every split of the stacks."""
    total = sum(num_splits(table.take(fit.rows), most, fit.allowed) for fit in work)
    done = 0
    for stack, members, chosen, ratio in work:
        here = table.take(members)
        for split in splits(here, most, chosen):
            seen, factors = here.take(split.calibrate), ratio[split.calibrate]
            fitted = fit(stack, seen, factors)
            plain = fitted if np.all(factors == 1.0) else fit(stack, seen)
            if len(split.score):
                rows, scored = members[split.score], here.take(split.score)
                boards.predicted.add(rows, fitted.predict(scored) * ratio[split.score])
                boards.closed_form.add(rows, plain.predict(scored))
            done += 1
            progress(done, total)


def sorted_into_stacks(table: RunTable) -> list[tuple[Stack, Rows]]:
    """Return the stacks with their rows; unknown groups go to the stack that suits their chip."""
    members: dict[str, list[int]] = {}
    for i, run in enumerate(table.runs):
        members.setdefault(stack_name(run.group, run.chip), []).append(i)
    sorted_rows = []
    for name, rows in members.items():
        groups = tuple(dict.fromkeys(table.runs[i].group for i in rows))
        sorted_rows.append((stacks()[name].with_groups(groups), np.array(rows, dtype=np.intp)))
    return sorted_rows


def stack_name(group: str, chip: str) -> str:
    """Return the stack of a group, else the first that has the chip, else the first of all."""
    known = stacks()
    for name, stack in known.items():
        if group in stack.groups:
            return name
    return next((name for name, stack in known.items() if chip in stack.chips), next(iter(known)))
