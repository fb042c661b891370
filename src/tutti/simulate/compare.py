"""A real step beside the simulated one: seconds per kind of instruction, and where the step went.

All figures are means per rank. Of the compute lane both sides are the seconds that a rank was busy.
Of the network and of copies they are the seconds in which at least one instruction of the kind was
under way, for many may be at once; the real side counts from an instruction's start until it was
known to be over, and so has whatever it waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tutti.cost.plan.simulator_inputs import FloatArray
from tutti.schedule.instruction import LANES, Lane, Op
from tutti.schedule.listing import OPS, Integers
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
        """Measured over predicted, on the compute lane; elsewhere they are not the same thing."""
        comparable = self.lane is Lane.COMPUTE and self.predicted_s
        return self.measured_s / self.predicted_s if comparable else None


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
        sums[0] += np.bincount(codes, minlength=len(OPS))
        sums[1] += _under_way(codes, start, end)
        sums[2] += _under_way(codes, own.start, own.end)
        sums[3] += np.bincount(codes, weights=own.waited, minlength=len(OPS))
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


def _under_way(codes: Integers, start: FloatArray, end: FloatArray) -> FloatArray:
    """Return the seconds of each kind: their sum on the compute lane, elsewhere their union."""
    seconds: FloatArray = np.bincount(codes, end - start, len(OPS)).astype(np.float64)
    for code in np.unique(codes).tolist():
        if LANES[OPS[code]] is Lane.COMPUTE:
            continue
        own = codes == code
        order = np.argsort(start[own], kind="stable")
        begins, ends = start[own][order], np.maximum.accumulate(end[own][order])
        before = np.concatenate([begins[:1], ends[:-1]])  # until when earlier ones reach
        seconds[code] = np.maximum(0.0, ends - np.maximum(begins, before)).sum()
    return seconds


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
