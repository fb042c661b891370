"""What a training job asks of whoever samples answers for it: a protocol.

Sampling needs the serving engine, and so lives in a room above this one (`recipes`); a job that
asks for it has it imported by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from importlib import import_module
from typing import Protocol

from tutti.train.checkpoint.coordinator import Coordinator
from tutti.train.data.open_data import PackedData
from tutti.train.engine.engine import Batches, Engine
from tutti.train.run.rank_context import RankContext

_MODULE = "tutti.recipes.reinforcement.rollouts"


class Rollouts(Protocol):
    """One rank of those that sample answers together."""

    seconds: float  # that the step at hand spent on its batch

    @property
    def figures(self) -> Mapping[str, float]:
        """What the newest batch came to."""

    def begin(self) -> None:
        """Keep what answers are held against; before the run's own weights are loaded."""

    def step(self, step: int) -> Batches:
        """Return a step's micro-batches."""

    def validate(self, steps: int) -> float:
        """Return how bad answers to held-out prompts are."""


class MakeRollouts(Protocol):
    """Makes one."""

    def __call__(
        self,
        context: RankContext,
        engine: Engine,
        coordinator: Coordinator,
        data: PackedData,
        stack: ExitStack,
    ) -> Rollouts:
        """Return a rank's part."""


def find_rollouts() -> MakeRollouts:
    """Return what makes them."""
    made: MakeRollouts = import_module(_MODULE).Rollouts
    return made
