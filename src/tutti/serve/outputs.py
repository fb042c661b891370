"""What comes out of an engine: pieces while they come, and whole answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tutti.batching.request import Finish

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A token's log-probability, and those of the likeliest in its place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one step added to one sample of a request."""

    request: int
    sample: int
    tokens: tuple[int, ...]
    text: str | None  # None without a tokenizer
    finish: Finish | None = None
    reason: str = ""  # of a failure
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One sample."""

    tokens: tuple[int, ...]
    text: str | None
    finish: Finish
    reason: str = ""
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds from a request's arrival."""

    first_token_s: float | None
    whole_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """All of a request."""

    request: int
    prompt: tuple[int, ...]
    answers: tuple[Answer, ...]
    cached_tokens: int  # of the prompt, that were not computed
    times: Times
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None  # None for the first token
    embedding: Tensor | None = None  # where that was asked for

    @property
    def text(self) -> str | None:
        """The first answer's text."""
        return self.answers[0].text

    @property
    def tokens(self) -> tuple[int, ...]:
        """The first answer's tokens."""
        return self.answers[0].tokens


@dataclass(slots=True)
class Counters:
    """What an engine has done."""

    steps: int = 0
    computed_tokens: int = 0
    sampled_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    stowed_pages: int = 0  # that moved to the host
    fetched_pages: int = 0  # that came back
    guessed_tokens: int = 0
    foreseen_tokens: int = 0  # of these
    finished: dict[str, int] = field(default_factory=dict)
