"""Validation: predict every usable run out of sample, by shipped calibrations or by new fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tutti.cost.arrays import FloatArray
from tutti.cost.calibration.fit import fit
from tutti.cost.calibration.rows import KNOWN, Cells, Skipped
from tutti.cost.calibration.score import GroupScore, Scoreboard
from tutti.cost.calibration.shipped import Calibration, best_match, shipped_calibrations
from tutti.cost.calibration.splits import MOST_ROWS, held_out, num_splits, splits
from tutti.cost.calibration.stacks import Stack, stacks
from tutti.cost.calibration.table import Rows, RunTable, load_runs
from tutti.cost.constants import Constants
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
        found = cells.text(self.column)
        try:
            return float(found) == float(self.value)
        except ValueError:
            return found == self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """Scores by group, and the rows that were left out with a reason each."""

    groups: dict[str, GroupScore]
    skipped: list[Skipped]
    extrapolated: dict[str, int]  # scored rows outside the range of their calibration, by group


def validate(
    path: Path,
    *,
    group: str | None = None,
    calibrate: int | None = None,
    calibrate_on: Sequence[Condition] = (),
    progress: Progress | None = None,
) -> Validation:
    """Predict the runs of a file and score them."""
    table, skipped, cells = load_runs(path)
    names = Counter(c.text("group") or "(none)" for c in cells)
    if group is not None and group not in names:
        raise InputError(f"{path}: has no group '{group}'; {hint(group, names)}")
    board = Scoreboard(table)
    outside: dict[str, int] = {}
    if calibrate is None and not calibrate_on:
        left_out, outside = _by_shipped(table, board)
        skipped = skipped + left_out
    else:
        wanted = {c.text("id"): all(on.holds(c) for on in calibrate_on) for c in cells}
        allowed = [wanted[run.id] for run in table.runs] if calibrate_on else None
        _by_fits(table, board, calibrate or MOST_ROWS, allowed, group, progress or _silent)
    shown = [group] if group is not None else list(names)
    of_group = {c.text("id"): c.text("group") or "(none)" for c in cells}
    return Validation(
        groups={name: board.score(name, names[name]) for name in shown},
        skipped=[s for s in skipped if of_group.get(s.id) in shown],
        extrapolated={name: outside[name] for name in shown if name in outside},
    )


# --- shipped calibrations --------------------------------------------------------------------


def _by_shipped(table: RunTable, board: Scoreboard) -> tuple[list[Skipped], dict[str, int]]:
    """Predict with what ships; rows that a calibration saw, and their cells, are left out."""
    used = {row for calibration in shipped_calibrations() for row in calibration.rows}
    seen = np.array([i for i, run in enumerate(table.runs) if run.id in used], dtype=np.intp)
    unseen = held_out(table, seen, range(len(table)))
    left_out = [
        Skipped(id=table.runs[i].id, why=_why_left_out(table.runs[i].id in used))
        for i in sorted(set(range(len(table))) - set(unseen.tolist()))
    ]
    by_calibration: dict[tuple[str, str], list[int]] = {}
    for i in unseen:
        run = table.runs[i]
        found = calibration_of(run.group, run.chip)
        by_calibration.setdefault((found.name if found else "", run.group), []).append(int(i))
    outside: Counter[str] = Counter()
    for (name, group), members in by_calibration.items():
        rows = np.array(members, dtype=np.intp)
        calibration = next((c for c in shipped_calibrations() if c.name == name), None)
        constants = calibration.constants(group) if calibration is not None else Constants()
        board.add(rows, _predicted(table.take(rows), constants))
        if calibration is not None:
            outside[group] += sum(bool(_outside(calibration, table, i)) for i in members)
    return left_out, {group: count for group, count in outside.items() if count}


def _why_left_out(itself: bool) -> str:
    whom = "this row" if itself else "a row of the same cell"
    return f"a shipped calibration was fitted on {whom}"


def _silent(done: int, total: int) -> None:
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


def _predicted(table: RunTable, constants: Constants) -> FloatArray:
    return price(table.shape, table.strategy, table.machine, constants).step_seconds


# --- new fits --------------------------------------------------------------------------------


def _by_fits(
    table: RunTable,
    board: Scoreboard,
    most: int,
    allowed: list[bool] | None,
    group: str | None,
    progress: Progress,
) -> None:
    """Fit and score every split of every stack (of the one that has `group`)."""
    work: list[tuple[Stack, Rows, Rows | None]] = []
    for stack, members in _sorted_into_stacks(table):
        if group is not None and group not in {table.runs[i].group for i in members}:
            continue
        chosen = None
        if allowed is not None:
            chosen = np.flatnonzero([allowed[i] for i in members])
        work.append((stack, members, chosen))
    total = sum(num_splits(table.take(m), most, chosen) for _, m, chosen in work)
    done = 0
    for stack, members, chosen in work:
        here = table.take(members)
        for split in splits(here, most, chosen):
            fitted = fit(stack, here.take(split.calibrate))
            if len(split.score):
                board.add(members[split.score], fitted.predict(here.take(split.score)))
            done += 1
            progress(done, total)


def _sorted_into_stacks(table: RunTable) -> list[tuple[Stack, Rows]]:
    """Return the stacks with their rows; unknown groups go to the stack that suits their chip."""
    members: dict[str, list[int]] = {}
    for i, run in enumerate(table.runs):
        members.setdefault(stack_name(run.group, run.chip), []).append(i)
    found = []
    for name, rows in members.items():
        groups = tuple(dict.fromkeys(table.runs[i].group for i in rows))
        found.append((stacks()[name].with_groups(groups), np.array(rows, dtype=np.intp)))
    return found


def stack_name(group: str, chip: str) -> str:
    """Return the stack of a group, else the first that has the chip, else the first of all."""
    known = stacks()
    for name, stack in known.items():
        if group in stack.groups:
            return name
    return next((name for name, stack in known.items() if chip in stack.chips), next(iter(known)))
