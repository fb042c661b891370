"""What rules look at of a run's steps: its figures beside what was usual, as series. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tutti.observe.store import Series

JOB = "the job"  # where a host would stand
RECENT = 50  # steps that say what is usual
LEAST_STEPS = 10  # of them, before anything is unusual
LEAST_LOSS = 0.1  # below it a loss is as good as none, and its noise no jump
_NAMES = {
    "forecast": "tutti_step_over_forecast_ratio",
    "usual": "tutti_step_over_usual_ratio",
    "undefined": "tutti_loss_undefined",
    "jump": "tutti_loss_over_usual_ratio",
    "data": "tutti_data_wait_ratio",
}


def step_series(steps: Sequence[Mapping[str, Any]]) -> list[Series]:
    """Return the series of steps as they stand in the lines of a run's figures, oldest first."""
    values: dict[str, list[tuple[int, float]]] = {name: [] for name in _NAMES.values()}
    seconds: list[float] = []
    losses: list[float] = []
    for step in steps:
        if "loss" not in step or step.get("at") is None:
            continue
        at, took, loss = int(step["at"]), float(step["seconds"]), _number(step["loss"])
        told = {
            "forecast": took / step["predicted_s"] if step.get("predicted_s") else None,
            "usual": _over_usual(took, seconds),
            "undefined": float(not math.isfinite(loss)),
            "jump": _over_usual(loss, losses, LEAST_LOSS),
            "data": _waited(step.get("pools"), took),
        }
        for name, value in told.items():
            if value is not None:
                values[_NAMES[name]].append((at, value))
        seconds.append(took)
        if math.isfinite(loss):
            losses.append(loss)
    return [series_of(name, points) for name, points in values.items() if points]


def series_of(name: str, points: Iterable[tuple[int, float]], host: str = JOB) -> Series:
    """Return points (second, value) as a series."""
    whole = list(points)
    numbers = np.array([value for _, value in whole], np.float32)
    at = np.array([second for second, _ in whole], np.int64)
    return Series(host=host, name=name, seconds=at, mean=numbers, least=numbers, most=numbers)


def _number(value: Any) -> float:
    """Return a loss; what JSON has no number for is none."""
    return float(value) if isinstance(value, (int, float)) else math.nan


def _over_usual(value: float, before: Sequence[float], least: float = 1e-6) -> float | None:
    """Return a value ÷ the median of those before it; None where they say nothing yet."""
    if len(before) < LEAST_STEPS or not math.isfinite(value):
        return None
    return value / max(least, statistics.median(before[-RECENT:]))


def _waited(pools: Mapping[str, Mapping[str, float]] | None, took: float) -> float | None:
    """Return the share of a step in which the pool that waited most had no samples."""
    if not pools or took <= 0.0:
        return None
    return max(float(pool["data_s"]) for pool in pools.values()) / took
