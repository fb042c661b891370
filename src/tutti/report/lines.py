"""Memory over time: a line per class of ranks, the chips' limits across."""

from __future__ import annotations

import numpy as np

from tutti.report.binary import Pack
from tutti.report.page import Section
from tutti.simulate.labels import ClassLabel
from tutti.simulate.result import SimulationResult

POINTS = 480  # slices of the step; each shows its maximum


def memory_section(
    result: SimulationResult, labels: tuple[ClassLabel, ...], arrays: Pack, *, name: str = "memory"
) -> Section:
    """Return the chart; the class that is nearest to its limit is drawn bold."""
    step = result.step_seconds
    curves = np.stack([
        result.memory(i).envelope(step, POINTS) * _slack(each.peak_bytes, labels[i])
        for i, each in enumerate(result.classes)
    ])  # fmt: skip
    groups = list(dict.fromkeys(label.chip or label.pool for label in labels))
    data = {
        "step": step,
        "points": POINTS,
        "series": [[label.name, groups.index(label.chip or label.pool)] for label in labels],
        "groups": groups,
        "limits": _limits(labels),
        "tightest": tightest(result, labels),
        "values": arrays.add(f"{name}.values", curves.reshape(-1), "f4"),
    }
    return Section(
        id=name,
        heading="Memory over time",
        intro="Bytes in use on one chip of each class; the class nearest to its limit is bold.",
        body='<ul class="legend" data-role="legend"></ul>'
        '<div class="lines"><canvas role="img" aria-label="Memory over time"></canvas></div>',
        scripts=("lines.js",),
        data={"part": "memory", **data},
    )


def tightest(result: SimulationResult, labels: tuple[ClassLabel, ...]) -> int:
    """Return the class whose peak is the largest part of its limit, or else the largest."""

    def fullness(index: int) -> tuple[float, float]:
        peak, limit = peak_of(result, labels, index), labels[index].limit_bytes
        return (peak / limit if limit else 0.0, peak)

    return max(range(result.num_classes), key=fullness)


def peak_of(result: SimulationResult, labels: tuple[ClassLabel, ...], index: int) -> float:
    """Return the bytes that a chip of a class has in use at most."""
    known = labels[index].peak_bytes
    return result.classes[index].peak_bytes if known is None else known


def _slack(simulated: float, label: ClassLabel) -> float:
    """Return how many times what was simulated a chip needs: the allocator keeps some to spare."""
    return label.peak_bytes / simulated if label.peak_bytes and simulated else 1.0


def _limits(labels: tuple[ClassLabel, ...]) -> list[list[object]]:
    limits: dict[float, dict[str, None]] = {}
    for label in labels:
        if label.limit_bytes is not None:
            limits.setdefault(label.limit_bytes, {})[label.chip or label.pool] = None
    return [[limit, ", ".join(names)] for limit, names in sorted(limits.items())]
