"""What a model is trained for beyond the next token: that one answer is preferred to another.

An `Objective` is a loss on whole answers. It sees the log-probability of each answer (of a reward
model its score), its number of tokens and, for some, what a reference model gives the same answer;
the formulas are in `accelerator.reference.preference_losses`. GRPO and RLOO learn from answers that
the model samples itself, and from their rewards (`accelerator.reference.sampled_answers`). Needs no
torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from tutti.document import AtLeast, AtMost
from tutti.models.sampling import Sampling

Kind = Literal["dpo", "ipo", "hinge", "orpo", "simpo", "kto", "reward", "grpo", "rloo"]
_BETAS: dict[str, float] = {"simpo": 2.0, "grpo": 0.0, "rloo": 0.05}
_BETA = 0.1
_SAMPLED = ("grpo", "rloo")
_WITHOUT_REFERENCE = ("orpo", "simpo", "reward")
_MARGIN = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A loss on answers: pairs of a chosen and a rejected one, or (KTO) single ones with a label.

    The reference is the model that the run begins with, unless `reference` names another folder of
    the same shape.
    """

    kind: Kind
    beta: Annotated[float, AtLeast(0)] | None = None  # default: 0.1; SimPO 2, GRPO 0, RLOO 0.05
    # SimPO: by how much the chosen one is to be ahead; default: 0.5
    margin: Annotated[float, AtLeast(0)] | None = None
    label_smoothing: Annotated[float, AtLeast(0), AtMost(0.5)] = 0.0  # DPO, SimPO
    answer_loss: Annotated[float, AtLeast(0)] | None = None  # times the chosen answer's own loss
    desirable_weight: Annotated[float, AtLeast(0)] = 1.0  # KTO
    undesirable_weight: Annotated[float, AtLeast(0)] = 1.0
    centre: Annotated[float, AtLeast(0)] = 0.0  # reward models: pulls a pair's scores around 0
    reference: str = ""
    sampling: Sampling | None = None  # GRPO, RLOO

    def __post_init__(self) -> None:
        if self.is_sampled is not (self.sampling is not None):
            raise ValueError(
                f"{self.kind} learns from sampled answers; say how with sampling: "
                "{rewards: [rewards.py:is_json]}"
                if self.is_sampled
                else f"'sampling' is for grpo and rloo, not for {self.kind}"
            )
        if self.beta == 0 and not self.is_sampled:
            raise ValueError(f"'beta' is 0; {self.kind} tells no answers apart without it")
        if self.margin is not None and self.kind != "simpo":
            rows = "; a reward model's margins are a field of the data" * self.gives_scores
            raise ValueError(f"'margin' is for simpo, not for {self.kind}{rows}")
        if self.gives_scores and self.beta is not None:
            raise ValueError("'beta' is for answers with probabilities; a reward model has scores")
        if self.centre and not self.gives_scores:
            raise ValueError(f"'centre' is for reward models, not for {self.kind}")
        if self.label_smoothing and self.kind not in ("dpo", "simpo"):
            raise ValueError(f"'label_smoothing' is for dpo and simpo, not for {self.kind}")
        if self.reference and not self.needs_reference:
            held = " with beta: 0" if self.is_sampled else ""
            raise ValueError(f"{self.kind}{held} has no reference model; leave 'reference' out")
        if self.answer_loss is not None and self.gives_scores:
            raise ValueError("'answer_loss' is of tokens; a reward model predicts none")
        if self.answer_loss is not None and not self.is_paired:
            raise ValueError(f"'answer_loss' is for pairs; {self.kind} has none")

    @property
    def strength(self) -> float:
        """β, as given or as usual."""
        return _BETAS.get(self.kind, _BETA) if self.beta is None else self.beta

    @property
    def lead(self) -> float:
        """By how much SimPO wants the chosen answer to be ahead."""
        return _MARGIN if self.margin is None else self.margin

    @property
    def gives_scores(self) -> bool:
        """Whether the model learns to score answers, and not to give them."""
        return self.kind == "reward"

    @property
    def own_loss(self) -> float:
        """The weight of the chosen answer's mean token loss beside the preference; of ORPO 1."""
        usual = 1.0 if self.kind == "orpo" else 0.0
        return usual if self.answer_loss is None else self.answer_loss

    @property
    def needs_reference(self) -> bool:
        """Whether answers are held against a reference model's."""
        if self.is_sampled:
            return self.strength > 0
        return self.kind not in _WITHOUT_REFERENCE

    @property
    def has_baseline(self) -> bool:
        """Whether a step asks first how far the model is from the reference: a forward pass."""
        return self.kind == "kto"

    @property
    def is_sampled(self) -> bool:
        """Whether the model samples the answers itself."""
        return self.kind in _SAMPLED

    @property
    def is_paired(self) -> bool:
        """Whether an example is two answers to one prompt."""
        return self.kind != "kto" and not self.is_sampled
