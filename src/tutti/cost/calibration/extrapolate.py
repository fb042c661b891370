"""Extrapolating judges: runs of a regime, predicted by constants that saw none of it.

Random splits say how well constants explain what is like their own rows. A user's question is often
unlike all of them: more chips, longer sequences, experts over nodes, another software stack, a chip
that nobody calibrated. Each judge keeps such rows aside, fits on what lies outside, and scores.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tutti.cost.arrays import FloatArray
from tutti.cost.calibration.baseline import errors_pct
from tutti.cost.calibration.build import LEAST_ROWS, RANGED, ranges_of
from tutti.cost.calibration.fit import FittedStack, Predictor, fit, unfitted
from tutti.cost.calibration.interval_fit import (
    CHIP,
    CLUSTER,
    STACK,
    Off,
    fit_widths,
    held_out_half_widths,
)
from tutti.cost.calibration.intervals import EXPERTS, NARROW, Widths, interval
from tutti.cost.calibration.residuals import least_half_width, unseen_residuals
from tutti.cost.calibration.rows import Skipped
from tutti.cost.calibration.score import regrets
from tutti.cost.calibration.splits import MOST_ROWS, by_id, calibration_rows, held_out
from tutti.cost.calibration.stacks import Prior, Stack
from tutti.cost.calibration.table import Rows, RunTable, load_runs
from tutti.cost.calibration.validate import (
    Progress,
    product_ratio,
    silent,
    sorted_into_stacks,
    stack_name,
)

Mask = npt.NDArray[np.bool_]
PRIOR_STACKS = 3  # what is believed of a constant weighs as much as so many stacks


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """Runs that are kept aside together."""

    name: str
    meaning: str
    inside: Callable[[RunTable], Mask]


REGIMES = (
    Regime(
        name="chips",
        meaning="more than 256 chips, from fewer",
        inside=lambda table: table.strategy.num_chips > 256,
    ),
    Regime(
        name="sequence",
        meaning="sequences of 32,768 tokens and more, from shorter ones",
        inside=lambda table: table.strategy.sequence_length >= 32_768,
    ),
    Regime(
        name="experts",
        meaning="expert groups beyond a node, from within",
        inside=lambda table: table.strategy.ep > table.machine.chips_per_node,
    ),
    Regime(
        name="hidden",
        meaning="hidden sizes up to 1,024, from larger ones",
        inside=lambda table: table.shape.hidden <= 1024,
    ),
    Regime(
        name="tensor",
        meaning="tensor parallelism over nodes, from within",
        inside=lambda table: table.strategy.tp > table.machine.chips_per_node,
    ),
    Regime(
        name="sharding",
        meaning="parameters sharded over more than 64 ranks, from fewer",
        inside=lambda table: (
            (table.strategy.shard >= 3) & (table.strategy.dp * table.strategy.cp > 64)
        ),
    ),
)
MEANINGS = {
    **{regime.name: regime.meaning for regime in REGIMES},
    CLUSTER: "a cluster, from the others of its stack",
    STACK: "a software stack, from the others, one of them on that chip",
    CHIP: "a chip, from its data sheet and the stacks of other chips",
}


class Judged(NamedTuple):
    """One run under one judge."""

    judge: str
    stack: str
    id: str
    row: int
    predicted: float
    measured: float
    half_width: float  # of its interval, by what the other stacks' rows say

    @property
    def is_inside(self) -> bool:
        """Whether the measured time lies in the interval of the predicted one."""
        low, high = interval(self.predicted, self.half_width)
        return low <= self.measured <= high

    @property
    def error_pct(self) -> float:
        """How far off, in percent; negative: predicted too fast."""
        return 100.0 * (self.predicted / self.measured - 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeScore:
    """How far predictions are off. Percent."""

    rows: int
    mean_pct: float
    median_pct: float
    worst_pct: float
    bias_pct: float  # of the geometric mean of predicted over measured
    worst_row: str
    regret_pct: float | None = None  # of choosing a strategy by prediction
    inside_pct: float  # rows inside of their 10–90 % intervals


@dataclass(frozen=True, slots=True, kw_only=True)
class Extrapolation:
    """Scores by judge, by stack and of everything (whole clusters and chips aside in both)."""

    by_judge: dict[str, JudgeScore]
    by_stack: dict[str, JudgeScore]
    together: JudgeScore | None
    judged: tuple[Judged, ...]
    widths: Widths  # of intervals, by all that was judged
    skipped: list[Skipped]


def extrapolate(
    path: Path, *, predictor: Predictor | None = None, progress: Progress | None = None
) -> Extrapolation:
    """Judge the runs of a file."""
    table, skipped, _ = load_runs(path)
    ratio = product_ratio(table, predictor)
    known = np.flatnonzero(np.isfinite(ratio))
    table, ratio = table.take(known), ratio[known]
    work = list(_tasks(table, ratio))
    rows: list[tuple[_Task, int, float]] = []
    off: list[Off] = []
    for done, task in enumerate(work, 1):
        predicted = task.fitted().predict(table.take(task.score)) * ratio[task.score]
        rows += [(task, int(i), float(s)) for i, s in zip(task.score, predicted, strict=True)]
        off += _off(task, table, ratio, predicted)
        (progress or silent)(done, len(work))
    judged = _judged(table, rows, held_out_half_widths(off))
    apart = [one for one in judged if one.judge not in (CHIP, CLUSTER)]
    names = dict.fromkeys(one.judge for one in judged)
    stacks_ = dict.fromkeys(one.stack for one in apart)
    return Extrapolation(
        by_judge={n: _score([o for o in judged if o.judge == n], table) for n in names},
        by_stack={n: _score([o for o in apart if o.stack == n], table) for n in stacks_},
        together=_score(apart, table) if apart else None,
        judged=judged,
        widths=fit_widths(off, f"tutti validate {path.name} --extrapolate"),
        skipped=skipped,
    )


class _Task(NamedTuple):
    """Rows to score, by a stack that was fitted to none of them."""

    judge: str
    name: str  # of the stack that the rows are of
    stack: Stack
    fitted: Callable[[], FittedStack]
    score: Rows
    seen: Rows  # fitted to these; none where others' constants are taken


def _tasks(table: RunTable, ratio: FloatArray) -> Iterator[_Task]:
    members = {name: (stack, rows) for name, stack, rows in _named(table)}
    for name, (stack, rows) in members.items():
        here = table.take(rows)
        for regime in REGIMES:
            inside = regime.inside(here)
            if inside.any():
                score, outside = rows[np.flatnonzero(inside)], rows[np.flatnonzero(~inside)]
                seen = _few(table, outside, score)
                fitted = functools.partial(_fitted, stack, table.take(seen), ratio[seen])
                yield _Task(regime.name, name, stack, fitted, score, seen)
        yield from _clusters(name, stack, table, ratio, rows)
    fit_all = functools.cache(lambda: _all_fitted(table, ratio))
    for name, (stack, rows) in members.items():
        chips = {table.runs[i].chip for i in rows}
        others = [other for other in members if other != name]
        foreign = [o for o in others if not chips & {table.runs[i].chip for i in members[o][1]}]
        for judge, teachers in ((STACK, others), (CHIP, foreign)):
            if judge == STACK and len(teachers) == len(foreign):
                continue  # nobody else has the chip
            fitted = functools.partial(_believed, stack, teachers, fit_all)
            yield _Task(judge, name, stack, fitted, rows, np.zeros(0, dtype=np.intp))


def _clusters(
    name: str, stack: Stack, table: RunTable, ratio: FloatArray, rows: Rows
) -> Iterator[_Task]:
    """Yield each cluster of a stack that has several, by a fit of the others."""
    for group in stack.groups if len(stack.groups) > 1 else ():
        own = np.array([table.runs[i].group == group for i in rows])
        score, others = rows[np.flatnonzero(own)], rows[np.flatnonzero(~own)]
        seen = _few(table, others, score)
        left = stack.with_groups(tuple(other for other in stack.groups if other != group))
        fitted = functools.partial(_elsewhere, stack, left, table.take(seen), ratio[seen])
        if len(seen) >= LEAST_ROWS:
            yield _Task(CLUSTER, name, left, fitted, score, seen)


def _elsewhere(stack: Stack, others: Stack, table: RunTable, factors: FloatArray) -> FittedStack:
    """Return a stack whose clusters all are the middle of the others'."""
    moves = _fitted(others, table, factors).moves()
    z = [moves[name] for name in stack.compute]
    z += [moves[name] for name in stack.cluster for _ in stack.groups]
    return FittedStack(stack, np.array(z))


def _off(task: _Task, table: RunTable, ratio: FloatArray, predicted: FloatArray) -> Iterator[Off]:
    """Yield how far a task's rows are off, and what was not known of them."""
    ranges, own = {}, 0.0
    if len(task.seen):
        seen = table.take(task.seen)
        ranges = ranges_of(seen)
        residuals = unseen_residuals(task.stack, seen, ratio[task.seen])
        own = least_half_width(residuals) or 0.0
    for row, seconds in zip(task.score.tolist(), predicted.tolist(), strict=True):
        values = {name: float(table.column(name)[row]) for name in RANGED}
        yield Off(
            judge=task.judge,
            stack=task.name,
            cluster=table.runs[row].group if task.judge == CLUSTER else "",
            choice=table.runs[row].choice,
            residual=float(np.log(seconds / table.measured[row])),
            own=own,
            narrow=values[NARROW] > 0,
            experts=values[EXPERTS] > 0,
            octaves={name: seen.octaves(values[name]) for name, seen in ranges.items()},
        )


def _judged(
    table: RunTable, rows: Sequence[tuple[_Task, int, float]], half_widths: FloatArray
) -> tuple[Judged, ...]:
    return tuple(
        Judged(
            task.judge,
            task.name,
            table.runs[row].id,
            row,
            seconds,
            float(table.measured[row]),
            float(width),
        )
        for (task, row, seconds), width in zip(rows, half_widths, strict=True)
    )


def _named(table: RunTable) -> Iterator[tuple[str, Stack, Rows]]:
    for stack, rows in sorted_into_stacks(table):
        run = table.runs[int(rows[0])]
        yield stack_name(run.group, run.chip), stack, rows


def _all_fitted(table: RunTable, ratio: FloatArray) -> dict[str, FittedStack]:
    """Return every stack as it is calibrated on its own rows."""
    fits = {}
    for name, stack, rows in _named(table):
        chosen = rows[calibration_rows(table.take(rows))]
        fits[name] = _fitted(stack, table.take(chosen), ratio[chosen])
    return fits


def _believed(
    stack: Stack, teachers: Sequence[str], fit_all: Callable[[], dict[str, FittedStack]]
) -> FittedStack:
    """Return a stack of which no run was seen: what the others say, and what was believed before.

    What carries over is how far a constant was from what was believed of it on its own chip.
    """
    moved: dict[str, list[float]] = {}
    for teacher in teachers:
        own = fit_all()[teacher]
        for name, z in own.moves().items():
            moved.setdefault(name, []).append(z)
    priors = dict(stack.priors)
    for name, moves in moved.items():
        if name not in priors:
            z = sum(moves) / (len(moves) + PRIOR_STACKS)
            value = float(stack.value(name, np.array(z)))
            priors[name] = Prior(median=value, sigma=stack.belief(name)[1])
    return unfitted(replace(stack, priors=priors))


def _few(table: RunTable, rows: Rows, scored: Rows) -> Rows:
    """Return at most as many rows as a calibration has, of no cell that is scored; all groups."""
    kept = held_out(table, scored, [int(i) for i in rows])
    groups = by_id(table, kept)
    most = max(1, MOST_ROWS // max(1, len(groups)))
    chosen = [members[:: max(1, -(-len(members) // most))] for members in groups.values()]
    return np.sort(np.concatenate(chosen)) if chosen else np.zeros(0, dtype=np.intp)


def _fitted(stack: Stack, table: RunTable, factors: FloatArray) -> FittedStack:
    return unfitted(stack) if len(table) < LEAST_ROWS else fit(stack, table, factors)


def _score(judged: Sequence[Judged], table: RunTable) -> JudgeScore:
    predicted = np.array([one.predicted for one in judged])
    measured = np.array([one.measured for one in judged])
    errors = errors_pct(predicted, measured)
    worst = judged[int(np.argmax(errors))]
    lost: list[float] = []
    for judge in dict.fromkeys(one.judge for one in judged):
        own = [i for i, one in enumerate(judged) if one.judge == judge]
        runs = [table.runs[judged[i].row] for i in own]
        for regret in regrets(runs, predicted[own], measured[own]).values():
            lost += regret
    return JudgeScore(
        rows=len(judged),
        mean_pct=float(errors.mean()),
        median_pct=float(np.median(errors)),
        worst_pct=float(errors.max()),
        bias_pct=float(100.0 * np.expm1(np.log(predicted / measured).mean())),
        worst_row=f"{worst.id} {worst.error_pct:+.0f} %",
        regret_pct=float(np.mean(lost)) if lost else None,
        inside_pct=100.0 * sum(one.is_inside for one in judged) / len(judged),
    )
