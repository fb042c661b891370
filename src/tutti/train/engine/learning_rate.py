"""The learning rate of every step: a warm-up, then the chosen way down."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRate:
    """Steps count from 1; what comes after the last one stays at the final rate.

    With `first` 0 the first step has the rate of the way's beginning, as in transformers: 0 if
    there is a warm-up.
    """

    peak: float
    kind: Literal["constant", "linear", "cosine", "stable"]
    steps: int
    warmup: int = 0
    decay: int = 0  # steps at the end in which "stable" comes down
    final_share: float = 0.1
    first: int = 1  # where on the way the first step is

    def at(self, step: int) -> float:
        """Return the learning rate of a step."""
        step += self.first - 1
        if self.warmup and step <= self.warmup:
            return self.peak * step / self.warmup
        return self.peak * (self.final_share + (1.0 - self.final_share) * self._height(step))

    def _height(self, step: int) -> float:
        """Return 1 at the end of the warm-up, 0 at the last step."""
        if self.kind == "constant":
            return 1.0
        start = self.warmup if self.kind != "stable" else max(self.warmup, self.steps - self.decay)
        if step <= start:
            return 1.0
        done = min(1.0, (step - start) / max(1, self.steps - start))
        if self.kind == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * done))
        return 1.0 - done
