"""How a model learns from a teacher's probabilities, not from labels alone. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from tutti.document import Above, AtLeast, AtMost, Count
from tutti.errors import InputError
from tutti.models.load import load_model
from tutti.models.spec import ModelSpec

Divergence = Literal["forward", "reverse", "js"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Distillation:
    """A loss of each token: how far the model's distribution is from a teacher's.

    With `top_k` the teacher tells its most probable tokens, and what all others together have: both
    distributions are then taken over these k + 1.
    """

    teacher: str  # a model folder of the same vocabulary
    divergence: Divergence = "forward"
    mixture: Annotated[float, Above(0), AtMost(1)] = 0.5  # js: the teacher's part of the middle
    temperature: Annotated[float, Above(0)] = 1.0
    share: Annotated[float, AtLeast(0), AtMost(1)] = 1.0  # of the loss; the labels have the rest
    top_k: Count | None = None
    stored: bool = False  # asked once, before the first step; or beside the model in every step

    def __post_init__(self) -> None:
        if not self.teacher:
            raise ValueError("'teacher' is empty; name a model folder")
        if self.stored and self.top_k is None:
            raise ValueError(
                "'stored' keeps the teacher's most probable tokens; say how many with top_k: 64"
            )
        if not self.share:
            raise ValueError("'share' is 0, so the teacher would teach nothing; leave it out")
        if self.mixture == 1.0 and self.divergence == "js":
            raise ValueError("'mixture' is 1: the middle would be the teacher; take forward")


def teacher_model(how: Distillation, student: ModelSpec) -> ModelSpec:
    """Return the teacher's model; refuse one that cannot teach this student."""
    spec = load_model(how.teacher)
    if spec.head.scores:
        raise InputError(f"distillation: {how.teacher} is a reward model and predicts no tokens")
    if spec.vocab != student.vocab:
        raise InputError(
            f"distillation: the teacher's vocabulary has {spec.vocab} tokens, the model's "
            f"{student.vocab}; both need the same (tutti model grow widens one)"
        )
    if student.prediction_heads:
        raise InputError("distillation: extra prediction heads have no teacher; train without")
    if how.top_k is not None and how.top_k >= spec.vocab:
        raise InputError(
            f"distillation: 'top_k' is {how.top_k} of {spec.vocab} tokens; leave it out to take all"
        )
    return spec
