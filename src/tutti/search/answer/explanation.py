"""What there is to say about a search's answer: words and figures, ready to be shown.

`explain` fills these in, `explain_drawing` puts them on a terminal, `report.planning` on a page.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from tutti.search.pricing.money_and_energy import Spending
from tutti.units import seconds_text

PROVEN = 0.005  # percent: a smaller gap to the bound is shown as none


class Cause(StrEnum):
    """What the bottleneck is short of."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """One group of equal replicas of a stage; times are those of a typical node."""

    name: str  # "stage 3", with pipeline and replica group where there are several
    pipeline: int
    stage: int
    replica: int
    pool: str
    chip: str
    num_chips: int
    tp: int
    cp: int
    dp: int  # equal copies
    degrees: str  # "tp 8 + sp, cp 2 (ring)"
    units: str  # "embedding, 1-20"
    num_units: int
    sequences: int  # of each micro-batch, per copy
    batch_share: float  # of each micro-batch, all copies together
    work_share: float  # of the model FLOPs of a step
    experts: str
    recompute: str  # empty where nothing is recomputed
    offload: str  # empty where nothing is moved to the host
    num_recomputed: int  # units
    micro_batch_seconds: float  # compute of one micro-batch, forward to weight gradient
    idle_share: float  # of the compute lane
    idle: Mapping[str, float]  # share of the step by reason
    memory_bytes: float  # at the peak, with driver context and allocator slack
    limit_bytes: float

    @property
    def memory_share(self) -> float:
        """Used part of the chip's memory."""
        return self.memory_bytes / self.limit_bytes if self.limit_bytes else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRow:
    """How well one pool is used; a chip without work counts as idle all the time."""

    pool: str
    chip: str
    num_chips: int
    unused_chips: int  # idle by the plan
    spare_chips: int
    peak_share: float  # of the cluster's peak FLOP/s
    work_share: float  # of the model FLOPs of a step
    idle_share: float
    idle: Mapping[str, float]  # share of the pool's time by reason
    basis: str  # what its prices rest on
    nominal: bool  # nothing was measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """The replica group that the step waits for."""

    row: int  # in Explanation.stages
    cause: Cause
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """What the objective counts of one of the plans that are held against each other."""

    name: str
    amount: float  # seconds, currency or joules of a step
    text: str  # with its unit
    ratio: float  # to the plan
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolAlone:
    """Throughput of one pool by itself."""

    pool: str
    tokens_per_second: float
    detail: str
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A search's answer in words and figures."""

    title: str
    headline: str
    details: tuple[str, ...]  # what the plan does, a sentence each
    step_seconds: float
    step_interval: str  # what 8 of 10 measured steps lie within
    tokens_per_second: float
    mfu: float
    slowdown: float  # the slowest of all nodes against a typical one
    mixed_efficiency_pct: float | None
    speedup: float | None
    gap_pct: float | None
    bound_text: str  # with its unit; empty where there is none
    search_cpu_seconds: float
    bottleneck: Bottleneck
    stages: tuple[StageRow, ...]
    pools: tuple[PoolRow, ...]
    compared: tuple[Compared, ...]  # the plan itself first
    counted: str  # what is compared: "seconds per step"
    spending: Spending | None
    alone: tuple[PoolAlone, ...]
    missing: tuple[str, ...]  # what could not be compared, and why
    runner_up: str
    bound: str
    pruned: tuple[str, ...]
    work: str  # what the search counted
    caveats: tuple[str, ...]  # what a reader must know before trusting the figures


def step_text(seconds: float) -> str:
    """Format the seconds of a step so that steps compare at a glance: always s above one."""
    if seconds < 1.0:
        return seconds_text(seconds)
    return f"{seconds:,.0f} s" if seconds >= 10_000 else f"{seconds:.4g} s"
