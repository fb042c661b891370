"""Scores of causes as shares of right answers: the table in `confidence.yaml`, made from cases."""

from __future__ import annotations

import functools
from importlib import resources
from itertools import pairwise

from tutti.document import Place, build
from tutti.errors import InputError
from tutti.files import parse_yaml

_FILE = "confidence.yaml"


@functools.cache
def _table() -> tuple[tuple[float, float], ...]:
    text = (resources.files("tutti.diagnose") / _FILE).read_text(encoding="utf-8")
    points = build(tuple[tuple[float, float], ...], parse_yaml(text, _FILE), Place(_FILE))
    rising = all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(points))
    if len(points) < 2 or not rising:
        raise InputError(f"{_FILE}: scores and hit rates must rise")
    return points


def confidence_of(score: float) -> float:
    """Return how often an answer of this score is right."""
    points = _table()
    if score <= points[0][0]:
        return max(0.05, score * points[0][1] / points[0][0])
    for (low, at_low), (high, at_high) in pairwise(points):
        if score <= high:
            return at_low + (at_high - at_low) * (score - low) / (high - low)
    return points[-1][1]
