"""What mixes of pools are worth to jobs, and which mix each job should have.

A job that is a model and tokens becomes a request whose shapes are nodes of one pool, or of several
(leftovers that join a mixed job), each with the pace that the best plan on it has. The scheduler
then weighs them like any others: what would be done soonest, now or later. Who asks the planner,
and keeps its answers, is `model_jobs`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tutti.errors import InputError
from tutti.fleet.request import JobRequest, Shape
from tutti.hardware.cluster import Cluster

Mix = tuple[tuple[str, int], ...]  # pools, and nodes of each


@dataclass(frozen=True, slots=True)
class Worth:
    """One mix: how fast a model trains on it, and what it costs."""

    mix: Mix
    tokens_per_s: float
    price_per_hour: float | None

    @property
    def tokens_per_price(self) -> float:
        """Tokens for a unit of the cluster's currency; 0 where prices are not known."""
        return 3600.0 * self.tokens_per_s / self.price_per_hour if self.price_per_hour else 0.0


def mixes(cluster: Cluster, least: int, most: int) -> Iterator[Mix]:
    """Yield numbers of nodes, doubling, of every pool alone and of every two pools alike."""
    if not 1 <= least <= most:
        raise InputError(f"from {least} to {most} nodes; give at least 1, and no fewer at most")
    count = least
    while count <= most:
        for pool in cluster.pools:
            if count <= pool.nodes:
                yield ((pool.name, count),)
        for first, second in itertools.combinations(cluster.pools, 2):
            each = count // 2
            if count % 2 == 0 and each <= min(first.nodes, second.nodes):
                yield ((first.name, each), (second.name, each))
        count *= 2


def request_by_worth(
    job: str, tokens: float, table: Sequence[Worth], *, best_price: bool = False,
    **others: Any,
) -> JobRequest:  # fmt: skip
    """Return what a job of so many tokens asks for; `best_price`: only mixes that waste no money.

    A mix is wasteful if another one is as fast and cheaper; prices must then be known.
    """
    kept = list(table)
    if best_price:
        kept = [
            one for one in kept
            if not any(o.tokens_per_s >= one.tokens_per_s
                       and o.tokens_per_price > one.tokens_per_price for o in table)
        ]  # fmt: skip
    fastest = kept[0].tokens_per_s
    shapes = tuple(Shape(one.mix, None, one.tokens_per_s / fastest) for one in kept)
    return JobRequest(job=job, seconds=tokens / fastest, shapes=shapes, **others)


def shared_out(
    nodes: Mapping[str, int], tables: Mapping[str, Sequence[Worth]], weights: Mapping[str, float]
) -> dict[str, Mix]:
    """Return the mix of every job with which Σ weight × tokens per second is largest.

    `nodes` are those of each pool that may be taken. Jobs for which nothing is left wait: they are
    not among the answer. Solved exactly, so that a mix of pools is used only where it helps.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    choices = [(job, one) for job, table in tables.items() for one in table]
    if not choices:
        return {}
    rows = {("job", job): 1.0 for job in tables} | {("pool", name): n for name, n in nodes.items()}
    place = {key: i for i, key in enumerate(rows)}
    entries = [
        (place[key], column, count)
        for column, (job, one) in enumerate(choices)
        for key, count in [(("job", job), 1), *((("pool", p), n) for p, n in one.mix)]
    ]
    at, columns, counts = zip(*entries, strict=True)
    value = [weights[job] * one.tokens_per_s for job, one in choices]
    solved = milp(
        [-worth / max(value) for worth in value],
        constraints=LinearConstraint(
            csr_array((counts, (at, columns)), shape=(len(rows), len(choices))),
            ub=list(rows.values()),
        ),
        bounds=Bounds(0, 1), integrality=[1] * len(choices),
    )  # fmt: skip
    return {job: one.mix for (job, one), x in zip(choices, solved.x, strict=True) if x > 0.5}
