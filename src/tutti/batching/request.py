"""`Request`: what somebody wants generated; `Sequence`: one of its samples on its way."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Finish(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # a stop token, or whoever reads it said so
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"  # its logits were no numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt, and what the scheduler must know of how it goes on."""

    id: int
    prompt: tuple[int, ...]
    most_new: int  # tokens per sample; 0: the prompt alone is computed
    samples: int = 1
    priority: int = 0  # more goes first
    adapter: str = ""  # prefixes are shared within one adapter and one salt
    salt: str = ""
    shares_prefix: bool = True  # False: reads no cached prefix (every token's logits are wanted)
    waits: bool = False  # for its tokens: the host looks at them before the next is sampled
    answered: int = 0  # the prompt's last tokens that are the answer's first: it began elsewhere


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample of a request, from its arrival to its end."""

    id: int
    request: Request
    sample: int
    order: float  # who goes first: the smaller; fixed on arrival, which is aging (see `Settings`)
    tokens: list[int]  # while it has no slot: the prompt and what was sampled
    base: int  # the length that its keys were made for (see `Settings.stretch`)
    siblings: list[Sequence] = field(default_factory=list)  # samples that fork off its prompt
    finish: Finish | None = None
    preemptions: int = 0
    cached: int = 0  # tokens of the prompt that the prefix tree had, on its first admission

    @property
    def limit(self) -> int:
        """The most tokens it may have."""
        return len(self.request.prompt) + self.request.most_new

    @property
    def goal(self) -> int:
        """How many of its tokens are computed: of the last one nothing is asked any more."""
        return max(len(self.request.prompt), self.limit - 1)

    @property
    def new_tokens(self) -> list[int]:
        """What was sampled, once it has left its slot."""
        return self.tokens[len(self.request.prompt) :]

    def before(self, other: Sequence) -> bool:
        """Tell whether it goes first."""
        return (self.order, self.id) < (other.order, other.id)

    __lt__ = before
