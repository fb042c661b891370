"""`SamplingParameters`: how a request's tokens are chosen, and when it ends."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tutti.errors import InputError

Prompt = str | Sequence[int]
MOST_LOGPROBS = 100
MOST_SAMPLES = 128


class TokenMask(Protocol):
    """Says which tokens may come next (a grammar); each sample has its own."""

    def allowed(self, tokens: Sequence[int]) -> NDArray[np.bool_]:
        """Return which tokens of the vocabulary may follow those that were generated."""


class TokenMasks(Protocol):
    """Makes a mask for each sample of a request."""

    def new(self) -> TokenMask:
        """Return the mask of a sample that has no tokens yet."""


class LogitsChange(Protocol):
    """Changes one sample's logits before a token is chosen."""

    def __call__(
        self, tokens: Sequence[int], logits: NDArray[np.float32], /
    ) -> NDArray[np.float32]:
        """Return logits of the vocabulary, from them and the tokens that were generated."""


@dataclass(frozen=True, slots=True)
class NamedChange:
    """Makes a change for each sample of a request; what it raises ends that request alone."""

    name: str
    new: Callable[[], LogitsChange]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParameters:
    """A request's wishes; the defaults take the likeliest token, up to 64 of them."""

    max_tokens: int = 64
    min_tokens: int = 0
    n: int = 1
    temperature: float = 0.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # of tokens in prompt and answer; above 1: less likely
    presence_penalty: float = 0.0  # taken off the logits of tokens in the answer
    frequency_penalty: float = 0.0  # the same, times how often they are there
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    bad_words: tuple[tuple[int, ...], ...] = ()  # runs of tokens that are never completed
    stop: tuple[str, ...] = ()  # texts that end an answer; they are not part of it
    stop_tokens: tuple[int, ...] = ()  # beside the model's own
    ignore_end: bool = False  # the model's own end does not end an answer
    seed: int | None = None
    logprobs: int | None = None  # of the chosen token, and of so many of the likeliest
    prompt_logprobs: int | None = None
    masks: TokenMasks | None = None
    changes: tuple[NamedChange, ...] = ()  # in this order, before biases and masks
    priority: int = 0
    salt: str = ""  # cached prefixes are shared among requests of one salt
    answered: int = 0  # the prompt's last tokens that are the answer's first: it began elsewhere
    adapter: str = ""  # the name of a LoRA adapter that the engine has; "": the model itself

    def check(self, name: str, vocab: int) -> None:
        """Refuse what cannot be, in one line with the request's name."""
        _between(name, "max_tokens", self.max_tokens, 1, None)
        _between(name, "min_tokens", self.min_tokens, 0, self.max_tokens)
        _between(name, "n", self.n, 1, MOST_SAMPLES)
        _between(name, "temperature", self.temperature, 0.0, 100.0)
        _between(name, "top_k", self.top_k, 0, None)
        _between(name, "top_p", self.top_p, 0.0, 1.0)
        _between(name, "min_p", self.min_p, 0.0, 1.0)
        _between(name, "repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _between(name, "presence_penalty", self.presence_penalty, -2.0, 2.0)
        _between(name, "frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        for what in ("logprobs", "prompt_logprobs"):
            if getattr(self, what) is not None:
                _between(name, what, getattr(self, what), 0, MOST_LOGPROBS)
        if any(not text for text in self.stop):
            raise InputError(f"{name}: an empty text in 'stop' would end it at once; leave it out")
        if any(not word for word in self.bad_words):
            raise InputError(f"{name}: 'bad_words' holds a run of no tokens; leave it out")
        for what, tokens in (
            ("logit_bias", tuple(self.logit_bias)),
            ("bad_words", tuple(token for word in self.bad_words for token in word)),
            ("stop_tokens", self.stop_tokens),
        ):
            check_tokens(f"{name}: '{what}'", tokens, vocab)
        for token, value in self.logit_bias.items():
            if math.isnan(value) or value == math.inf:
                raise InputError(f"{name}: 'logit_bias' of token {token} is {value}")

    @property
    def draws(self) -> bool:
        """Whether a random number decides."""
        return self.temperature > 0

    @property
    def cuts(self) -> bool:
        """Whether not all tokens may be drawn."""
        return self.draws and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def penalises(self) -> bool:
        """Whether tokens that are there change logits."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    @property
    def looks_back(self) -> bool:
        """Whether the host must know all tokens before the next one is sampled."""
        return (
            self.masks is not None
            or bool(self.changes)
            or any(len(word) > 1 for word in self.bad_words)
        )


def check_tokens(what: str, tokens: Sequence[int], vocab: int) -> None:
    """Refuse tokens that the model does not have."""
    for token in tokens:
        if not 0 <= token < vocab:
            raise InputError(f"{what}: token {token}; the vocabulary has 0 to {vocab - 1}")


def _between(name: str, what: str, value: float, least: float, most: float | None) -> None:
    if not (least <= value and (most is None or value <= most)):
        limit = f"at least {least}" if most is None else f"{least} to {most}"
        raise InputError(f"{name}: '{what}' is {value}; it may be {limit}")


def mixed_seed(seed: int, sample: int) -> int:
    """Return a 64-bit seed of one sample of a request."""
    if not sample:
        return int(np.int64(np.uint64(seed & (2**64 - 1))))
    digest = hashlib.blake2b(f"{seed}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def listed_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return prompts as a list: one may be given alone, as text or as tokens."""
    if isinstance(prompts, str):
        return [prompts]
    listed = list(prompts)
    if listed and isinstance(listed[0], int | np.integer):
        return [listed]  # type: ignore[list-item]  # tokens of one prompt
    return listed  # type: ignore[return-value]
