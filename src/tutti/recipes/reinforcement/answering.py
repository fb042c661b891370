"""Who answers a batch of prompts: what `Rollouts` asks for, and what all forms of it share."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tutti.errors import TuttiError
from tutti.hardware.cluster import Cluster
from tutti.models.spec import ModelSpec
from tutti.recipes.reinforcement.places import Load, answer_seconds, bounds_of, share_out
from tutti.recipes.reinforcement.rewards import Judged
from tutti.train.data.order import TrainingOrder, ValidationRows
from tutti.train.data.prompt_rows import PromptRecord, PromptRows


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A batch that is to be answered: training prompts by its number, or those held out."""

    number: int
    prompts: int
    group: int
    held_out: bool = False  # the likeliest answers

    def records(self, train: TrainingOrder, held: ValidationRows | None) -> list[PromptRecord]:
        """Return its prompts."""
        if self.held_out:
            assert held is not None
            return [_prompt(held, i) for i in range(self.prompts)]
        first = self.number * self.prompts
        return [_prompt(train, first + i) for i in range(self.prompts)]

    def seed(self, seed: int, prompt: int) -> int:
        """Return where a prompt's random numbers come from: the same on any chip."""
        digest = hashlib.blake2b(f"{seed}/{self.number}/{prompt}".encode(), digest_size=7).digest()
        return int.from_bytes(digest, "little")


def _prompt(order: TrainingOrder | ValidationRows, sample: int) -> PromptRecord:
    part, row = order.part_and_row(sample)
    assert isinstance(part.rows, PromptRows)
    return part.rows.prompts[row]


def bounds(
    spec: ModelSpec, cluster: Cluster, pools: Sequence[str], load: Load
) -> list[tuple[int, int]]:
    """Return which prompts of a batch each chip answers."""
    seconds = functools.partial(answer_seconds, spec, cluster, load)
    return bounds_of(share_out(load.prompts, pools, seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """A batch that was answered and judged."""

    prompts: list[PromptRecord]
    answers: list[list[list[int]]]  # by prompt
    judged: list[Judged]
    texts: list[str]  # of the first prompt's
    seconds: dict[str, float] = field(default_factory=dict)
    logps: list[list[list[float]]] | None = None  # of the tokens, by those who drew them

    @classmethod
    def of(
        cls, prompts: list[PromptRecord], said: dict[str, Any], seconds: dict[str, float]
    ) -> Answers:
        """Take what a judge said, as plain values; raise what it ends the run with."""
        if "error" in said:
            raise TuttiError(said["error"])
        return cls(
            prompts=prompts,
            answers=said["answers"],
            judged=[Judged(rewards=tuple(r), problem=p) for r, p in said["judged"]],
            texts=said["texts"],
            seconds=seconds,
            logps=said.get("logps"),
        )


class Answering(Protocol):
    """One training rank's part of having prompts answered; all of them ask alike."""

    ends: tuple[int, ...]

    def start(self) -> str:
        """Get ready; return why it cannot be."""

    def answered(self, order: Order, coming: Order | None) -> Answers:
        """Return a batch, the same on every rank; `coming` is what will be asked for next."""

    def explain(self) -> list[str]:
        """Return in words who answers."""
