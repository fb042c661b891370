"""Requests as they come: drawn from a description with a seed, or read from a trace."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tutti.errors import InputError
from tutti.plan.serving import Lengths, Traffic

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
MOST_REQUESTS = 2_000_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Requests:
    """Columns, one row per request, by rising arrival."""

    times: F64  # seconds
    prompts: I64  # tokens
    outputs: I64
    # what prompts begin with: blocks of `block` tokens by their names, as in Mooncake's traces
    blocks: tuple[tuple[int, ...], ...] = ()
    block: int = 512
    shared_prefix: int = 0  # tokens that all begin with

    def __len__(self) -> int:
        return len(self.times)

    @property
    def shares_prefixes(self) -> bool:
        """Whether prompts have beginnings in common."""
        return bool(self.blocks) or self.shared_prefix > 0

    def tokens(self, index: int) -> tuple[int, ...]:
        """Return a prompt as token numbers: the same where prompts are the same."""
        count = int(self.prompts[index])
        if self.blocks:
            names, size = self.blocks[index], self.block
            tokens = [1 + name * size + place for name in names for place in range(size)]
            tokens += _own(index, max(0, count - len(tokens)))
            return tuple(token % 2**31 for token in tokens[:count])
        if self.shared_prefix:
            common = min(self.shared_prefix, count - 1)
            return (*range(1, common + 1), *_own(index, count - common))
        return (0,) * count

    def scaled(self, rate: float) -> Requests:
        """Return the same requests at another rate, in requests per second."""
        span = float(self.times[-1] - self.times[0]) if len(self) > 1 else 0.0
        if span <= 0:
            return self
        own = (len(self) - 1) / span
        return replace(self, times=(self.times - self.times[0]) * (own / rate))

    def first(self, count: int) -> Requests:
        """Return the first requests alone."""
        return replace(
            self,
            times=self.times[:count],
            prompts=self.prompts[:count],
            outputs=self.outputs[:count],
            blocks=self.blocks[:count],
        )


def _own(index: int, count: int) -> Sequence[int]:
    """Return tokens that no other request has, as far as numbers of 31 bits reach."""
    start = 2**30 + (index * 8191) % 2**29
    return range(start, start + count)


def draw(traffic: Traffic, count: int, seed: int = 0) -> Requests:
    """Return requests as a description says; the same seed draws the same ones."""
    if not 0 < count <= MOST_REQUESTS:
        raise InputError(f"requests: {count:,} to draw; give 1 to {MOST_REQUESTS:,}")
    random = np.random.default_rng(seed)
    prompts, outputs = (_lengths(part, count, random) for part in (traffic.prompt, traffic.output))
    return Requests(
        times=arrival_times(traffic.arrivals, count, traffic.requests_per_s, traffic.burst, random),
        prompts=prompts,
        outputs=outputs,
        shared_prefix=traffic.shared_prefix,
    )


def _lengths(lengths: Lengths, count: int, random: np.random.Generator) -> I64:
    drawn = random.lognormal(
        math.log(lengths.mean) - lengths.sigma**2 / 2, lengths.sigma or 1e-12, count
    )
    lengths_n: I64 = np.clip(np.round(drawn), 1, lengths.longest).astype(np.int64)
    return lengths_n


def arrival_times(
    kind: str, count: int, rate: float | None, burst: int, random: np.random.Generator
) -> F64:
    """Return when requests come, in seconds: evenly, at random, or so many at a time at random."""
    if rate is None:
        return np.zeros(count)
    if kind == "even":
        return np.arange(count) / rate
    each = burst if kind == "bursts" else 1
    gaps = random.exponential(each / rate, -(-count // each))
    times: F64 = np.repeat(np.cumsum(gaps), each)[:count]
    return times


def summed_up(requests: Requests, source: str = "") -> Traffic:
    """Return the description of a trace: what a plan records of it."""
    span = float(requests.times[-1] - requests.times[0]) if len(requests) > 1 else 0.0
    return Traffic(
        prompt=_summary(requests.prompts),
        output=_summary(requests.outputs),
        requests_per_s=(len(requests) - 1) / span if span > 0 else None,
        shared_prefix=requests.shared_prefix,
        source=source,
    )


def _summary(tokens: I64) -> Lengths:
    return Lengths(
        mean=round(float(tokens.mean()), 2),
        sigma=round(float(min(5.0, np.log(tokens).std())), 3),
        longest=int(tokens.max()),
    )
