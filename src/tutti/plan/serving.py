"""What a Plan for serving says beside its placement: the service, its engines, their routes.

A pipeline of such a plan is an engine, or `count` equal ones. Its micro-batches are the steps that
are under way at a time, each of `micro_batch` sequences: together the engine's slots.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal

from tutti.document import Above, AtLeast, AtMost, Count, Natural
from tutti.hardware.chip import Dtype

PAGE_SIZE = 16
Part = Annotated[float, AtLeast(0), AtMost(1)]
PositiveSeconds = Annotated[float, Above(0), AtMost(1e6)]


def _below(value: float) -> float:
    """Return the share of a standard normal distribution below a value."""
    return 0.5 * (1.0 + math.erf(value / math.sqrt(2.0)))


class Role(StrEnum):
    """Which part of a request an engine computes."""

    BOTH = "both"
    PREFILL = "prefill"  # the prompt and the first token
    DECODE = "decode"  # all others, from keys and values that a prefill engine made


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens of a prompt or an answer: a lognormal distribution, cut at `longest`."""

    mean: Annotated[float, AtLeast(1), AtMost(2**28)]
    sigma: Annotated[float, AtLeast(0), AtMost(5)] = 0.0  # of the logarithm; 0: all have the mean
    longest: Annotated[int, AtLeast(1), AtMost(2**28)]

    def __post_init__(self) -> None:
        if self.mean > self.longest:
            raise ValueError(
                f"the mean of {self.mean:g} tokens is above the longest, {self.longest}"
            )

    @property
    def expected(self) -> float:
        """The mean of what is left when longer ones are cut."""
        sigma = self.sigma
        if sigma < 1e-9:
            return min(self.mean, float(self.longest))
        over = (math.log(self.longest / self.mean) - sigma**2 / 2) / sigma
        whole = self.mean * _below(over) + self.longest * (1.0 - _below(over + sigma))
        return max(1.0, whole)

    @property
    def lasting(self) -> float:
        """The mean over time of those under way, each there as long as it has tokens."""
        sigma = self.sigma
        if sigma < 1e-9:
            return self.expected
        over = (math.log(self.longest / self.mean) - sigma**2 / 2) / sigma
        squares = self.mean**2 * math.exp(sigma**2) * _below(over - sigma)
        squares += self.longest**2 * (1.0 - _below(over + sigma))
        return max(self.expected, squares / self.expected)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Requests as they come."""

    prompt: Lengths
    output: Lengths
    requests_per_s: Annotated[float, Above(0), AtMost(1e9)] | None = None  # None: all at once
    arrivals: Literal["poisson", "bursts", "even"] = "poisson"
    burst: Count = 8  # requests at a time, where they come in bursts
    shared_prefix: Natural = 0  # tokens that all prompts begin with
    source: str = ""  # the trace that these figures sum up

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return self.prompt.longest + self.output.longest


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a user still takes: at least `share` of the requests keep both."""

    first_token_s: PositiveSeconds | None = None
    per_token_s: PositiveSeconds | None = None  # on average over a request's later tokens
    share: Annotated[float, Above(0), AtMost(1)] = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What a job that serves is for."""

    traffic: Traffic
    limits: Limits = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """How a pipeline serves; its slots are its sequences, its chips those of its stages."""

    role: Role = Role.BOTH
    pages: Count  # of keys and values, for all steps under way; every stage has its layers of each
    page_size: Count = PAGE_SIZE  # tokens
    host_pages: Natural = 0  # on the hosts, for sequences that lose their slots; as `pages`
    chunk: Count = 2048  # tokens of a step at most
    share: Part = 0.0  # of all requests, for all equal engines together; of decode: its routes say
    weights: Dtype | None = None  # None: the job's
    cache: Dtype | None = None  # of keys and values; None: as activations


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Which decode engines go on with what a prefill engine began, by numbers of pipelines."""

    prefill: Natural
    decode: Natural
    share: Part = 1.0  # of that prefill engine's requests
