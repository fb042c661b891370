"""Which chips answer and which train, by the prices that planning and serving have. No torch.

All chips take turns: the plan's chips train, then every one of them answers as many prompts as its
price says, so that all end together. Or whole pools do nothing but answer, one batch ahead, while
the others train: whichever is slower sets the pace.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from tutti.cost.serving.stage_prices import Formats, stage_prices
from tutti.cost.serving.step_load import decode_load, prefill_load, windows_of
from tutti.errors import TuttiError
from tutti.hardware.cluster import Cluster
from tutti.hardware.topology import Position
from tutti.models.spec import ModelSpec
from tutti.plan.plan import RankMap
from tutti.train.run.planning import Job, problem_of, search_question, tuned
from tutti.units import many, seconds_text

MOST_SLOTS = 64  # answers that a chip works on at a time
Seconds = Callable[[str, int], float]  # a chip of a pool, prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a batch asks of those who answer."""

    prompts: int
    group: int
    prompt_tokens: int
    answer_tokens: int

    def of(self, prompts: int) -> Load:
        """Return the same for another number of prompts."""
        return replace(self, prompts=prompts)


def answering_chips(job: Job) -> list[Position]:
    """Return the chips that only answer: all of the pools that the job names."""
    objective = job.config.objective
    named = () if objective is None or objective.sampling is None else objective.sampling.answering
    return [
        Position(name, node, slot)
        for name in named
        for node in range(job.cluster.pool(name).nodes)
        for slot in range(job.cluster.pool(name).node.num_chips)
    ]


def answer_seconds(spec: ModelSpec, cluster: Cluster, load: Load, pool: str, prompts: int) -> float:
    """Return how long one chip of a pool takes to answer some prompts."""
    if not prompts:
        return 0.0
    prices = stage_prices(spec.untuned, (0, spec.num_units), cluster, pool, 1, Formats())
    windows, slots = windows_of(spec.untuned), min(MOST_SLOTS, prompts * load.group)
    waves = -(-prompts * load.group // slots)
    context = load.prompt_tokens + load.answer_tokens / 2
    step_s = prices.seconds(decode_load(slots, context, windows)) + prices.own.step_s
    one = prices.seconds(prefill_load([(0, load.prompt_tokens)], windows))
    return prompts * one + waves * load.answer_tokens * step_s


def share_out(prompts: int, pools: Sequence[str], seconds: Seconds) -> list[int]:
    """Return how many prompts each chip answers, so that the last one is done soonest."""
    counts = [0] * len(pools)
    priced = functools.cache(seconds)
    for _ in range(prompts):
        best = min(range(len(pools)), key=lambda i: (priced(pools[i], counts[i] + 1), counts[i], i))
        counts[best] += 1
    return counts


def bounds_of(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Return each chip's range of the prompts."""
    ends = list(itertools.accumulate(counts))
    return list(zip([0, *ends[:-1]], ends, strict=True))


def pools_of_ranks(job: Job) -> list[str]:
    """Return the pool of every rank's chip."""
    places = RankMap(job.plan)
    return [places.place(rank).chip.pool for rank in range(job.plan.num_ranks)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """All chips answer, then train."""

    counts: tuple[int, ...]  # prompts of each rank
    pools: tuple[str, ...]  # of each rank
    generate_s: float
    train_s: float  # all updates of a batch

    @property
    def batch_s(self) -> float:
        """Seconds of a batch."""
        return self.generate_s + self.train_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """Some pools answer, one batch ahead, while the others train."""

    answering: tuple[str, ...]
    training: tuple[str, ...]
    generate_s: float
    train_s: float

    @property
    def batch_s(self) -> float:
        """Seconds of a batch: neither waits for the other longer than it must."""
        return max(self.generate_s, self.train_s)


def turns_of(job: Job, load: Load, step_s: float) -> Turns:
    """Return the shares of a job's ranks, and what a batch takes."""
    pools = pools_of_ranks(job)
    seconds = functools.partial(answer_seconds, job.spec, job.cluster, load)
    counts = share_out(load.prompts, pools, seconds)
    slowest = max(seconds(pool, count) for pool, count in zip(pools, counts, strict=True))
    return Turns(
        counts=tuple(counts),
        pools=tuple(pools),
        generate_s=slowest,
        train_s=step_s * _updates(job),
    )


def _updates(job: Job) -> int:
    objective = job.config.objective
    assert objective is not None
    assert objective.sampling is not None
    return objective.sampling.updates


def apart_now(job: Job, load: Load, step_s: float) -> Apart:
    """Return what a job comes to whose answering chips are named."""
    chips = [chip.pool for chip in answering_chips(job)]
    return Apart(
        answering=tuple(dict.fromkeys(chips)),
        training=tuple(dict.fromkeys(pools_of_ranks(job))),
        generate_s=_slowest(job, load, chips),
        train_s=step_s * _updates(job),
    )


def _slowest(job: Job, load: Load, chips: Sequence[str]) -> float:
    seconds = functools.partial(answer_seconds, job.spec, job.cluster, load)
    counts = share_out(load.prompts, chips, seconds)
    return max(seconds(pool, count) for pool, count in zip(chips, counts, strict=True))


def explained_apart(apart: Apart) -> list[str]:
    """Return in words who answers and who trains, and who waits."""
    waits = "answering" if apart.generate_s < apart.train_s else "training"
    return [
        f"{' and '.join(apart.answering)} answer in {seconds_text(apart.generate_s)} while "
        f"{' and '.join(apart.training)} train in {seconds_text(apart.train_s)}: "
        f"{seconds_text(apart.batch_s)} a batch as predicted, and the {waits} chips wait"
    ]


def apart_of(job: Job, load: Load) -> Iterator[Apart]:
    """Yield every way to let whole pools answer and plan the job for the others."""
    cluster, names = job.cluster, [pool.name for pool in job.cluster.pools]
    for size in range(1, len(names)):
        for answering in itertools.combinations(names, size):
            training = tuple(name for name in names if name not in answering)
            config = replace(job.config, job=replace(job.config.job, pools=training))
            spec = tuned(job.spec.untuned.with_training(answers=True), job.config.tuning)
            try:
                best = search_question(problem_of(config, spec, cluster))
            except TuttiError:  # the others have no room for it
                continue
            chips = [pool.name for pool in cluster.pools if pool.name in answering
                     for _ in range(pool.num_chips)]  # fmt: skip
            yield Apart(
                answering=answering, training=training, generate_s=_slowest(job, load, chips),
                train_s=best.step_seconds * _updates(job),
            )  # fmt: skip


def explained(turns: Turns, apart: Sequence[Apart] = ()) -> list[str]:
    """Return in words who does what, and what the other way would come to."""
    by_pool: dict[str, list[str]] = {}
    for count, pool in zip(turns.counts, turns.pools, strict=True):
        by_pool.setdefault(pool, []).append(str(count))
    take = "takes" if len(turns.pools) == 1 else "take"
    shares = ", ".join(f"{pool} {'+'.join(counts)}" for pool, counts in by_pool.items())
    lines = [
        f"{many(len(turns.pools), 'chip')} {take} turns: {many(sum(turns.counts), 'prompt')} of a "
        f"batch are answered in {seconds_text(turns.generate_s)} ({shares}), then trained on in "
        f"{seconds_text(turns.train_s)}: {seconds_text(turns.batch_s)} a batch, as predicted"
    ]
    best = min(apart, key=lambda one: one.batch_s, default=None)
    if best is not None:
        waits = "answering" if best.generate_s < best.train_s else "training"
        lines.append(
            f"apart, {' and '.join(best.answering)} would answer in "
            f"{seconds_text(best.generate_s)} while {' and '.join(best.training)} train in "
            f"{seconds_text(best.train_s)}: {seconds_text(best.batch_s)} a batch, and the "
            f"{waits} chips wait"
        )
    return lines
