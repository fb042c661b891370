"""What a simulated deployment showed: latencies, throughput, use of every chip, the queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tutti.cost.serving.engine_prices import EnginePrices
from tutti.plan.plan import Plan
from tutti.plan.serving import Limits
from tutti.simulate.serving.requests import Requests
from tutti.simulate.serving.simulated_engine import EngineRecord, Job, TimedStep

F64 = NDArray[np.float64]
QUEUE_POINTS = 480
BY_CHANCE = 0.9
FILLING = 0.5  # of the time until the queue is empty, in which slots fill


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineUse:
    """What the engines of one pipeline did, on average over those that were simulated."""

    pipeline: int
    copies: int
    role: str
    pools: tuple[str, ...]
    chips: int  # of one engine
    stage_use: tuple[float, ...]  # share of the time that each stage computed
    steps: int
    tokens_per_step: float
    rows_per_step: float  # decodes
    preemptions: int
    stowed_pages: int
    fetched_pages: int
    most_pages: int
    pages: int
    basis: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServingResult:
    """Per request in columns, and summed up."""

    requests: int  # that came to the whole deployment
    simulated: int
    seconds: float  # from the first arrival to the last token
    steady_s: float  # the part of it in which slots were filled and requests still came
    steady_requests: float  # of the whole deployment, in that part
    steady_tokens: float
    first_s: F64
    per_token_s: F64  # NaN for answers of one token
    whole_s: F64
    output_tokens: float  # of the whole deployment
    within: float  # share of requests within the limits
    limits: Limits
    engines: tuple[EngineUse, ...]
    queue: tuple[F64, F64, F64]  # time, waiting, with a slot; of what was simulated
    steps: tuple[TimedStep, ...] = ()

    @property
    def request_rate(self) -> float:
        """Requests per second that ended while others still came or waited."""
        return self.steady_requests / self.steady_s if self.steady_s > 0 else 0.0

    @property
    def output_rate(self) -> float:
        """Tokens per second."""
        return self.steady_tokens / self.steady_s if self.steady_s > 0 else 0.0

    @property
    def goodput(self) -> float:
        """Requests per second within the limits."""
        return self.request_rate * self.within

    @property
    def keeps_limits(self) -> bool:
        """Whether as many requests as wanted are within the limits."""
        return self.within >= self.limits.share

    def percentiles(self, name: str) -> dict[str, float]:
        """Return mean, median and tail of a column."""
        values: F64 = getattr(self, name)
        known = values[np.isfinite(values)]
        if not len(known):
            return {"mean": 0.0, "p50": 0.0, "p90": 0.0, "p99": 0.0}
        p50, p90, p99 = np.percentile(known, (50, 90, 99)).tolist()
        return {"mean": float(known.mean()), "p50": p50, "p90": p90, "p99": p99}

    def to_document(self) -> dict[str, object]:
        """Return it for JSON."""
        return {
            "requests": self.requests,
            "simulated": self.simulated,
            "seconds": self.seconds,
            "requests_per_s": self.request_rate,
            "tokens_per_s": self.output_rate,
            "goodput_per_s": self.goodput,
            "within_limits": self.within,
            "first_token_s": self.percentiles("first_s"),
            "per_token_s": self.percentiles("per_token_s"),
            "whole_s": self.percentiles("whole_s"),
            "engines": [
                {name: getattr(use, name) for name in use.__slots__} for use in self.engines
            ],
            "most_waiting": int(self.queue[1].max()) if len(self.queue[1]) else 0,
        }


def sum_up(
    plan: Plan,
    prices: Sequence[EnginePrices],
    requests: Requests,
    jobs: Sequence[Job],
    engines: Sequence[EngineRecord],
    steps: Sequence[TimedStep],
    queue: F64,
) -> ServingResult:
    """Sum up a simulation; what was left out stands for as many requests as its equal saw."""
    assert plan.job.serving is not None
    limits = plan.job.serving.limits
    jobs = [job for job in jobs if not job.left]
    arrived = np.array([job.arrived_s for job in jobs])
    first = np.array([job.first_s for job in jobs])
    ended = np.array([job.finished_s for job in jobs])
    outputs = np.array([job.output for job in jobs], np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        per_token = np.where(outputs > 1, (ended - first) / (outputs - 1), np.nan)
    begin = float(requests.times[0]) if len(requests) else 0.0
    end = float(ended.max()) if len(ended) else begin
    times, waiting, busy = _thinned(queue)
    steady = _steady(begin, end, requests, engines)
    stands_for = len(requests) / len(jobs) if jobs else 1.0
    return ServingResult(
        requests=len(requests),
        simulated=len(jobs),
        seconds=end - begin,
        steady_s=steady[1] - steady[0],
        steady_requests=_came(first, ended, np.ones(len(jobs)), steady) * stands_for,
        steady_tokens=_came(first, ended, outputs, steady) * stands_for,
        first_s=first - arrived,
        per_token_s=per_token,
        whole_s=ended - arrived,
        output_tokens=float(outputs.sum()) * stands_for,
        within=_within(first - arrived, per_token, limits),
        limits=limits,
        engines=tuple(
            _use(plan, p, prices[p], [e for e in engines if e.group == p], end - begin)
            for p in range(len(plan.pipelines))
        ),
        queue=(times, waiting, busy),
        steps=tuple(steps),
    )  # fmt: skip


def _within(first: F64, per_token: F64, limits: Limits) -> float:
    if not len(first):
        return 1.0
    good = np.ones(len(first), np.bool_)
    if limits.first_token_s is not None:
        good &= first <= limits.first_token_s
    if limits.per_token_s is not None:
        good &= np.isnan(per_token) | (per_token <= limits.per_token_s)
    return float(good.mean())


def _steady(
    begin: float, end: float, requests: Requests, engines: Sequence[EngineRecord]
) -> tuple[float, float]:
    """Return from when to when there was as much to do as there is in the long run.

    In the end the last ones run out, of an engine of several lanes one lane before the other; in
    the beginning slots fill, which takes a part of the rest.
    """
    last = float(requests.times[-1]) if len(requests) else begin
    queued = max((engine.waited_s for engine in engines), default=begin)
    # whose queues end nearly at the same time do so by chance, as lengths fell
    queued = min((e.waited_s for e in engines if e.waited_s >= BY_CHANCE * queued), default=queued)
    until = max(last, queued)
    if until <= begin:
        return begin, end
    return begin + FILLING * (until - begin), until


def _came(first: F64, ended: F64, amounts: F64, span: tuple[float, float]) -> float:
    """Return what came in a span, of answers in proportion to the time that they had in it."""
    with np.errstate(divide="ignore", invalid="ignore"):
        length = np.maximum(ended - first, 1e-9)
        inside = np.minimum(ended, span[1]) - np.maximum(first, span[0])
        share = np.where(ended > first, inside / length, (first > span[0]) & (first <= span[1]))
    return float((np.clip(share, 0.0, 1.0) * amounts).sum())


def _thinned(rows: F64) -> tuple[F64, F64, F64]:
    """Return the queue at few points, each the most of its slice."""
    if not len(rows):
        empty = np.zeros(0)
        return empty, empty, empty
    size = -(-len(rows) // QUEUE_POINTS)
    starts = np.arange(0, len(rows), size)
    return (
        rows[starts, 0],
        np.maximum.reduceat(rows[:, 1], starts),
        np.maximum.reduceat(rows[:, 2], starts),
    )


def _use(
    plan: Plan, number: int, prices: EnginePrices, engines: Sequence[EngineRecord], span: float
) -> EngineUse:
    pipeline = plan.pipelines[number]
    steps = sum(engine.used.steps for engine in engines)
    whole = max(span, 1e-12) * len(engines)
    stages = range(len(pipeline.stages))
    return EngineUse(
        pipeline=number,
        copies=pipeline.copies,
        role=prices.engine.role.value,
        pools=tuple(dict.fromkeys(stage.pool.name for stage in prices.stages)),
        chips=prices.num_chips,
        stage_use=tuple(sum(e.used.busy_s[s] for e in engines) / whole for s in stages),
        steps=steps,
        tokens_per_step=sum(e.used.tokens for e in engines) / max(1, steps),
        rows_per_step=sum(e.used.rows for e in engines) / max(1, steps),
        preemptions=sum(e.used.preemptions for e in engines),
        stowed_pages=sum(e.used.stowed_pages for e in engines),
        fetched_pages=sum(e.used.fetched_pages for e in engines),
        most_pages=max((e.used.most_pages for e in engines), default=0) * prices.lanes,
        pages=prices.engine.pages,
        basis=prices.basis,
    )
