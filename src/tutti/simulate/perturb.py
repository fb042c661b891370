"""Steps that do not go as planned: jitter on every instruction, chips slower than their kind.

Deterministic by seed, and per class: the jitter of one class does not change when others do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tutti.cost.plan.simulator_inputs import ClassCosts, FloatArray, StepCosts
from tutti.errors import InputError, nearest
from tutti.schedule.instruction import LANES, Lane
from tutti.schedule.schedule import Schedule
from tutti.simulate.kernel import Backend
from tutti.simulate.labels import labels_of, pools_of
from tutti.simulate.program import Program, compile_schedule
from tutti.simulate.run import simulate

_MOST_NAMES = 12  # of classes, in a message
Slow = Mapping[str | int, float]  # pool, class label or class index → factor on its compute


def perturb(
    schedule: Schedule,
    costs: StepCosts,
    *,
    seed: int = 0,
    sigma: float = 0.0,
    slow: Slow | None = None,
) -> StepCosts:
    """Return the costs of one unlucky step.

    Every instruction's seconds are multiplied by a log-normal factor of mean 1 and spread
    `sigma`; passes of slow classes also by their factor (their links keep their speed).
    """
    if not 0 <= sigma < 10:
        raise InputError(f"jitter is {sigma:g}; give a spread such as 0.05 for about 5 %")
    factors = _slow_factors(schedule, slow or {})
    classes = []
    for index, (given, rank_class) in enumerate(zip(costs.classes, schedule.classes, strict=True)):
        factor = np.ones(len(given.seconds))
        if sigma:
            rng = np.random.default_rng([seed, index])
            factor = np.exp(rng.normal(-sigma * sigma / 2, sigma, len(factor)))
        if factors[index] != 1.0:
            passes = [LANES[entry.op] is Lane.COMPUTE for entry in rank_class.instructions]
            factor = factor * np.where(passes, factors[index], 1.0)
        classes.append(_scaled(given, factor))
    return dataclasses.replace(costs, classes=tuple(classes))


def _scaled(given: ClassCosts, factor: FloatArray) -> ClassCosts:
    breakdown = given.breakdown
    if breakdown is not None and breakdown.ndim == 2:
        breakdown = breakdown * factor[:, None]
    return dataclasses.replace(given, seconds=given.seconds * factor, breakdown=breakdown)


def _slow_factors(schedule: Schedule, slow: Slow) -> list[float]:
    labels = labels_of(schedule)
    names: dict[str | int, list[int]] = {}
    for index, rank_class in enumerate(schedule.classes):
        own: list[str | int] = [index, labels[index].name, rank_class.name]
        for name in (*own, *pools_of(schedule.plan, rank_class)):
            known = names.setdefault(name, [])
            if index not in known:
                known.append(index)
    factors = [1.0] * len(schedule.classes)
    for name, factor in slow.items():
        if name not in names:
            raise InputError(f"--slow: no pool or class '{name}'; {_known(schedule, str(name))}")
        if not 0 < factor < 1e6:
            raise InputError(f"--slow: {name} is {factor:g}; give a factor such as 1.2")
        for index in names[name]:
            factors[index] *= factor
    return factors


def _known(schedule: Schedule, name: str) -> str:
    """Return the name that was meant, or the pools and then the classes, each list by itself."""
    pools = list(dict.fromkeys(p for c in schedule.classes for p in pools_of(schedule.plan, c)))
    classes = list(dict.fromkeys(label.name for label in labels_of(schedule)))
    guess = nearest(name, [*pools, *classes])
    if guess is not None:
        return f"did you mean '{guess}'?"
    more = f", … ({len(classes)} in all)" if len(classes) > _MOST_NAMES else ""
    return f"pools: {', '.join(pools)}; classes: {', '.join(classes[:_MOST_NAMES])}{more}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Step times of repeated runs."""

    seconds: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean step time."""
        return float(np.mean(self.seconds))

    def percentile(self, percent: float) -> float:
        """Return the step time that `percent` of the runs do not exceed."""
        return float(np.percentile(self.seconds, percent))

    def to_document(self) -> dict[str, object]:
        """Return the figures that reports show."""
        return {
            "runs": len(self.seconds),
            "mean_s": self.mean,
            "min_s": min(self.seconds),
            "p50_s": self.percentile(50),
            "p95_s": self.percentile(95),
            "max_s": max(self.seconds),
        }


def repeat(
    schedule: Schedule | Program,
    costs: StepCosts,
    *,
    runs: int = 20,
    seed: int = 0,
    sigma: float = 0.0,
    slow: Slow | None = None,
    backend: Backend = "auto",
) -> Spread:
    """Simulate several steps, each with jitter of its own."""
    if runs < 1:
        raise InputError(f"runs is {runs}; must be at least 1")
    program = schedule if isinstance(schedule, Program) else compile_schedule(schedule)
    once = perturb(program.schedule, costs, slow=slow)
    times = [
        simulate(
            program,
            perturb(program.schedule, once, seed=seed + run, sigma=sigma),
            backend=backend,
        ).step_seconds
        for run in range(runs)
    ]
    return Spread(seconds=tuple(times))
