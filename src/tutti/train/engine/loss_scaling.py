"""The factor on the loss that keeps fp16 gradients within range; it finds itself.

It is the factor on the *mean* loss, as is usual: what the engine differentiates is the sum over
tokens, so that it divides by (a power of two near) the number of tokens. Gradients that are not
finite show in the norm that all ranks share, so that all skip the step and halve the scale alike;
after many good steps it is doubled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from tutti.plan.job import Job

FIRST_SCALE = 2.0**16
SMALLEST_SCALE = 2.0**-24  # no gradient of finite weights overflows down here
GROWTH_STEPS = 2000


class LossScaling:
    """The scale of a job's loss, and how long it has been good; constant where none is needed."""

    def __init__(self, job: Job) -> None:
        self.is_dynamic = job.precision.loss_scaling
        self.scale = FIRST_SCALE if self.is_dynamic else 1.0
        self.good_steps = 0  # since the scale changed
        self._tokens = 2.0 ** math.floor(math.log2(job.tokens)) if self.is_dynamic else 1.0

    @property
    def factor(self) -> float:
        """What the sum of token losses is multiplied by; a power of two, so that it is exact."""
        return self.scale / self._tokens

    def end_step(self, *, skipped: bool) -> None:
        """Note whether a step's gradients were finite."""
        if not self.is_dynamic:
            return
        if skipped:
            self.scale, self.good_steps = self.scale / 2, 0
            if self.scale < SMALLEST_SCALE:
                raise RuntimeError(
                    f"loss scale {self.scale:g}: gradients are not finite at any scale; the "
                    "weights or the data hold infinities"
                )
            return
        self.good_steps += 1
        if self.good_steps == GROWTH_STEPS:
            self.scale, self.good_steps = self.scale * 2, 0

    def state_dict(self) -> dict[str, float]:
        """Return what a checkpoint keeps."""
        return {"scale": self.scale, "good_steps": float(self.good_steps)}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on where a checkpoint left off; a job without scaling takes nothing of it."""
        if self.is_dynamic:
            self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])
