"""Building the calibrations that ship, by a fixed rule: every k-th row by id, from the first.

At most 40 rows per chip and stack, and at most a third of a group. Cluster constants of a group
without calibration rows stay at their priors.
"""

from __future__ import annotations

import datetime
from pathlib import Path

import numpy as np

from tutti.cost.arrays import FloatArray
from tutti.cost.calibration.baseline import errors_pct
from tutti.cost.calibration.fit import FittedStack, Predictor, fit
from tutti.cost.calibration.residuals import least_half_width, unseen_residuals
from tutti.cost.calibration.shipped import Calibration, FitReport, Fitted, Range
from tutti.cost.calibration.splits import LEAST_STRIDE, MOST_ROWS, calibration_rows
from tutti.cost.calibration.stacks import Stack, stacks
from tutti.cost.calibration.table import RunTable
from tutti.cost.constants import registry
from tutti.errors import InputError

# What a calibration's range is told of: fields of shape and strategy.
RANGED = ("hidden", "sequence_length", "tokens", "tp", "pp", "dp", "cp", "ep", "experts", "fp8")
LEAST_ROWS = 3  # fewer say little of a stack: its intervals are those of one that nobody measured
_DIGITS = 5


_ROUNDS = 3  # factors depend on the constants, but little: they stay within 1e-3 after two


def build_calibrations(
    table: RunTable, origin: str, predictor: Predictor | None = None
) -> list[Calibration]:
    """Return a calibration of every stack that the table has rows of.

    The constants are fitted to what the predictor says; without one, to the vectorised formulas.
    """
    calibrations = []
    for name, stack in stacks().items():
        here = table.of_groups(stack.groups)
        if len(here):
            calibrations.append(calibrate_stack(name, stack, here, origin, predictor))
    return calibrations


def calibrate_stack(
    name: str, stack: Stack, table: RunTable, origin: str, predictor: Predictor | None = None
) -> Calibration:
    """Fit one stack by the fixed rule."""
    chosen = table.take(calibration_rows(table, most=MOST_ROWS))
    if not len(chosen):
        raise InputError(
            f"stack '{name}': none of {len(table)} usable runs may calibrate, for at most one in "
            f"{LEAST_STRIDE} of a group does; give at least {LEAST_STRIDE}, or leave these out"
        )
    fitted, factors = fit(stack, chosen), np.ones(len(chosen))
    for _ in range(_ROUNDS if predictor is not None else 0):
        assert predictor is not None
        factors = _factors(fitted, chosen, predictor)
        known = np.isfinite(factors)
        chosen, factors = chosen.take(np.flatnonzero(known)), factors[known]
        fitted = fit(stack, chosen, factors)
    errors = errors_pct(fitted.predict(chosen) * factors, chosen.measured)
    compute, clusters = _written(stack, fitted)
    width = least_half_width(unseen_residuals(stack, chosen, factors))
    return Calibration(
        name=name,
        stack=stack.stack,
        chips=stack.chips,
        groups=stack.groups,
        date=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        origin=origin,
        rule=(
            f"every k-th row by id from the first, at most {MOST_ROWS} per chip and stack "
            f"and 1/{LEAST_STRIDE} of a group"
        ),
        compute=compute,
        clusters=clusters,
        fit=FitReport(
            rows=len(chosen),
            mape_pct=round(float(errors.mean()), 2),
            worst_pct=round(float(errors.max()), 2),
            half_width=None if width is None else round(width, 4),
        ),
        ranges=ranges_of(chosen),
        rows=tuple(run.id for run in chosen.runs),
    )


def _factors(fitted: FittedStack, table: RunTable, predictor: Predictor) -> FloatArray:
    """Return what the predictor says of each run over what the formulas say, under a fit."""
    factors = np.full(len(table), np.nan)
    for group in fitted.stack.groups:
        rows = np.flatnonzero([run.group == group for run in table.runs])
        here = table.take(rows)
        factors[rows] = predictor(here, fitted.constants(group)) / fitted.predict(here)
    return factors


def _written(
    stack: Stack, fitted: FittedStack
) -> tuple[dict[str, Fitted], dict[str, dict[str, Fitted]]]:
    shared, by_group = fitted.values()
    moved = {*stack.compute, *stack.cluster}
    kept = {n: _fitted(n, v, free=False) for n, v in stack.medians().items() if n not in moved}
    compute = {name: _fitted(name, value) for name, value in shared.items()} | kept
    clusters = {
        group: {name: _fitted(name, value) for name, value in values.items()}
        for group, values in by_group.items()
    }
    return compute, clusters


def _fitted(name: str, value: float, *, free: bool = True) -> Fitted:
    return Fitted(value=float(f"{value:.{_DIGITS}g}"), unit=registry()[name].unit, free=free)


def ranges_of(table: RunTable) -> dict[str, Range]:
    """Return the least and greatest value of every figure that runs have."""
    ranges = {}
    for name in RANGED:
        values = np.atleast_1d(table.column(name))
        ranges[name] = Range(low=float(values.min()), high=float(values.max()))
    return ranges


def save_calibrations(calibrations: list[Calibration], folder: Path) -> list[Path]:
    """Write one file each."""
    folder.mkdir(parents=True, exist_ok=True)
    return [calibration.save(folder) for calibration in calibrations]
