"""Fitting: the constants of a stack from few measured runs.

Each free constant is z log-sigmas from its median. Minimised is Σ soft-L1(ln(predicted/measured)
÷ noise) + Σ z²: robust against slow outliers, and what the runs do not tell stays where it was
believed to be. The Jacobian prices all neighbours of a point at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tutti.cost.arrays import FloatArray
from tutti.cost.calibration.runs import Run
from tutti.cost.calibration.solve import solve
from tutti.cost.calibration.stacks import Stack
from tutti.cost.calibration.table import RunTable
from tutti.cost.constants import Constants, registry
from tutti.cost.families import family_median, family_priors
from tutti.cost.step import price

MOST_EVALUATIONS = 40


class Predictor(Protocol):
    """What predicts the step times of runs under some constants."""

    @property
    def refused(self) -> Mapping[str, str]:
        """Why it cannot predict a run, by the run's id."""

    def __call__(self, table: RunTable, constants: Constants) -> FloatArray:
        """Return seconds per step; not a number for runs that it refuses."""


@dataclass(frozen=True, slots=True, eq=False)
class FittedStack:
    """Free constants of a stack: the shared ones, then each cluster constant per group."""

    stack: Stack
    z: FloatArray

    def values(self) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
        """Return the shared constants, and the cluster constants by group."""
        stack = self.stack
        shared = {name: float(stack.value(name, self.z[i])) for i, name in enumerate(stack.compute)}
        by_group: dict[str, dict[str, float]] = {group: {} for group in stack.groups}
        at = len(stack.compute)
        for name in stack.cluster:
            for group in stack.groups:
                by_group[group][name] = float(stack.value(name, self.z[at]))
                at += 1
        return shared, by_group

    def moves(self) -> dict[str, float]:
        """Return by how many log-sigmas each constant moved; a cluster's as its groups' mean."""
        stack, count = self.stack, max(1, len(self.stack.groups))
        moves = {name: float(self.z[i]) for i, name in enumerate(stack.compute)}
        at = len(stack.compute)
        for name in stack.cluster:
            moves[name] = float(self.z[at : at + count].mean())
            at += count
        return moves

    def constants(self, group: str) -> Constants:
        """Return all constants for the runs of a group."""
        shared, by_group = self.values()
        return Constants(**{**self.stack.medians(), **shared, **by_group[group]})

    def predict(self, table: RunTable) -> FloatArray:
        """Return the predicted seconds per step."""
        return _predict(self.stack, self.z, table, _group_rows(self.stack, table))


def _group_rows(stack: Stack, table: RunTable) -> npt.NDArray[np.intp]:
    """Return each run's group as its number; one of no group of the stack counts as the first."""
    numbers = {group: i for i, group in enumerate(stack.groups)}
    return np.array([numbers.get(run.group, 0) for run in table.runs], dtype=np.intp)


def _constants(
    stack: Stack, z: FloatArray, groups: npt.NDArray[np.intp], runs: Sequence[Run]
) -> Constants:
    """Return constants that broadcast as (points, runs) for z of shape (points, free).

    A constant that is believed to differ between the architectures of a stack's chips keeps that
    ratio: the stack's value is that of its first chip.
    """
    values: dict[str, FloatArray | float] = dict(stack.medians())
    for i, name in enumerate(stack.compute):
        values[name] = stack.value(name, z[..., i, None])
    at, count = len(stack.compute), len(stack.groups)
    for name in stack.cluster:
        values[name] = stack.value(name, z[..., at : at + count])[..., groups]
        at += count
    for name in {name for run in runs for name in family_priors(run.chip)} | set(stack.medians()):
        if name not in stack.priors:
            own = np.array([family_median(name, run.chip) for run in runs])
            first = family_median(name, stack.chips[0]) if stack.chips else registry()[name].prior
            values[name] = values.get(name, registry()[name].prior) * own / first
    return Constants(**values)


def _predict(
    stack: Stack, z: FloatArray, table: RunTable, groups: npt.NDArray[np.intp]
) -> FloatArray:
    constants = _constants(stack, z, groups, table.runs)
    return price(table.shape, table.strategy, table.machine, constants).step_seconds


def unfitted(stack: Stack) -> FittedStack:
    """Return the stack at its priors."""
    return FittedStack(stack, np.zeros(stack.num_free))


def fit(stack: Stack, table: RunTable, factors: FloatArray | None = None) -> FittedStack:
    """Return the constants that explain the runs best; the priors where there are none.

    A run's prediction is the formulas' times its factor: what another predictor says over them.
    """
    if not len(table):
        return unfitted(stack)
    groups, times = _group_rows(stack, table), 1.0 if factors is None else factors
    z, _ = solve(
        lambda z: _predict(stack, z, table, groups) * times,
        table.measured,
        noise=stack.noise,
        size=stack.num_free,
        evaluations=MOST_EVALUATIONS,
    )
    return FittedStack(stack, z)
