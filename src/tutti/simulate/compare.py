"""A real step beside the simulated one: seconds per kind of instruction, and where the step went.

All figures are means per rank. Of the compute lane both sides are the seconds that a rank was busy;
of the network and of copies the real side has everything from an instruction's start until it was
known to be over, and so whatever it waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tutti.schedule.instruction import LANES, Lane, Op
from tutti.schedule.listing import OPS
from tutti.simulate.measured import MeasuredRank, MeasuredStep
from tutti.simulate.result import ClassResult, IdleReason, SimulationResult


@dataclass(frozen=True, slots=True, kw_only=True)
class KindTimes:
    """One kind of instruction on a mean rank."""

    op: Op
    count: float
    predicted_s: float
    measured_s: float
    waited_s: float  # that compute was kept waiting

    @property
    def lane(self) -> Lane:
        """Where it runs."""
        return LANES[self.op]

    @property
    def ratio(self) -> float | None:
        """Measured over predicted."""
        return self.measured_s / self.predicted_s if self.predicted_s else None


# What a rank's step is made of: the real figure, and how the simulation says the same.
PARTS: Mapping[str, tuple[str, Callable[[ClassResult], float]]] = {
    "compute": ("compute_s", lambda c: sum(c.compute.values())),
    "communication": ("communication_s", lambda c: c.idle[IdleReason.COMMUNICATION]),
    "bubble": ("bubble_s", lambda c: c.idle[IdleReason.BUBBLE]),
    "copies": ("copy_s", lambda c: c.idle[IdleReason.COPY]),
    "data": ("data_s", lambda _: 0.0),
    "other": ("other_s", lambda _: 0.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolParts:
    """Where the step of a pool's mean rank went, by PARTS."""

    pool: str
    ranks: int
    predicted: Mapping[str, float]
    measured: Mapping[str, float]


def compare_kinds(
    result: SimulationResult, step: MeasuredStep, pool: str | None = None
) -> tuple[KindTimes, ...]:
    """Return every kind of instruction that the plan has, of all ranks or of a pool's."""
    ranks = [own for own in step.ranks if pool is None or own.pool == pool]
    sums = np.zeros((4, len(OPS)))  # count, predicted, measured, waited
    for own in ranks:
        start, end = result.timeline(own.rank_class)
        codes = result.program.op[result.program.span(own.rank_class)]
        weights = (np.ones(len(codes)), end - start, own.end - own.start, own.waited)
        for row, values in enumerate(weights):
            sums[row] += np.bincount(codes, weights=values, minlength=len(OPS))
    means = sums / max(1, len(ranks))
    return tuple(
        KindTimes(
            op=op,
            count=float(count),
            predicted_s=float(predicted),
            measured_s=float(measured),
            waited_s=float(waited),
        )
        for op, count, predicted, measured, waited in zip(OPS, *means, strict=True)
        if count
    )


def compare_parts(result: SimulationResult, step: MeasuredStep) -> tuple[PoolParts, ...]:
    """Return where the step of each pool went."""
    pools: dict[str, list[MeasuredRank]] = {}
    for own in step.ranks:
        pools.setdefault(own.pool, []).append(own)
    return tuple(_pool_parts(result, pool, ranks) for pool, ranks in pools.items())


def _pool_parts(result: SimulationResult, pool: str, ranks: Sequence[MeasuredRank]) -> PoolParts:
    count = len(ranks)
    return PoolParts(
        pool=pool,
        ranks=count,
        predicted={
            name: sum(of(result.classes[own.rank_class]) for own in ranks) / count
            for name, (_, of) in PARTS.items()
        },
        measured={
            name: sum(own.parts.get(key, 0.0) for own in ranks) / count
            for name, (key, _) in PARTS.items()
        },
    )
