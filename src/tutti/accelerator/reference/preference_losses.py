"""Losses on whole answers: DPO, IPO, hinge, ORPO, SimPO, KTO, and those of reward models.

Each is a function of the answers' log-probabilities. Its slope in them is what the tokens' own
losses are weighted with, and so the head needs one kind of loss only: it sums up the tokens of each
answer, asks here for loss and slopes, and runs the same cross-entropy with these as weights. That
gradient is exact, and no logits are kept.

Sources: DPO (Rafailov et al. 2023), IPO (Azar et al. 2023, with log-probabilities per token), hinge
(SLiC, Zhao et al. 2023), ORPO (Hong et al. 2024), SimPO (Meng et al. 2024), KTO (Ethayarajh et al.
2024), reward models (Bradley–Terry; with margins as in Touvron et al. 2023, §3.2.2, centred as in
Eisenstein et al. 2023). Of a reward model scores stand in the place of log-probabilities, and a
pair's margin in that of the chosen answer's reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tutti.accelerator.host_to_device import moved
from tutti.models.objective import Objective


class Weighed(NamedTuple):
    """What a loss on answers comes to."""

    loss: Tensor  # the sum over the examples
    slopes_s: Tensor  # ∂loss / ∂log-probability of each document
    figures: Tensor  # sums over the examples: reward margin, examples on the right side


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Which documents of a batch are answers, and how they are compared.

    Without an objective they are only added up: the sum of (log-probability − reference) is the
    "loss", as KTO's estimate of a divergence needs it.
    """

    objective: Objective | None
    first_e: Tensor  # documents: of each example the chosen answer, or the only one
    second_e: Tensor  # the rejected answer; none of KTO
    weight_e: Tensor  # of the examples; of KTO negative where the answer is not wanted
    reference_s: Tensor  # log-probabilities of all documents by the reference; 0: there is none
    baseline: float = 0.0  # KTO: how far the model is from the reference, on other answers
    speaks: bool = True  # whether this rank counts: one of those that share out the rows

    @classmethod
    def of(
        cls,
        objective: Objective | None,
        weights: Sequence[float],
        references: Sequence[float],
        device: torch.device,
    ) -> Answers:
        """Take the documents of a batch by their weights, as a `Row` has them.

        Of a pair the chosen answer has its weight, and the rejected one behind it minus that.
        Documents of weight 0 are none, unless all that is asked for is a sum.
        """
        if objective is None:
            chosen = [i for i, weight in enumerate(weights) if weight]
        elif objective.is_paired:
            chosen = [i for i, weight in enumerate(weights) if weight > 0]
        else:
            chosen = [i for i, weight in enumerate(weights) if weight]
        paired = objective is not None and objective.is_paired
        first = torch.tensor(chosen, dtype=torch.long)
        return cls(
            objective=objective,
            first_e=moved(first, device),
            second_e=moved(first + 1 if paired else first[:0], device),
            weight_e=moved(torch.tensor([weights[i] for i in chosen]), device),
            reference_s=moved(torch.tensor(list(references), dtype=torch.float32), device),
        )

    @property
    def count(self) -> int:
        """Examples, as far as this rank counts them."""
        return self.first_e.shape[0] if self.speaks else 0

    def silent(self) -> Answers:
        """Return the same for a rank that shares rows with one that counts them."""
        return replace(self, speaks=False)

    def weigh(self, logps_s: Tensor, counts_s: Tensor) -> Weighed:
        """Return loss and slopes for the log-probabilities and tokens of all documents."""
        with torch.enable_grad():
            logps = logps_s.detach().clone().requires_grad_()
            losses_e, margins_e, right_e = self._losses(logps, counts_s.clamp_min(1.0))
            loss = losses_e.sum()
            (slopes,) = torch.autograd.grad(loss, logps) if losses_e.numel() else (logps * 0,)
        figures = torch.stack((margins_e.sum(), right_e.sum()))
        said = 1.0 if self.speaks else 0.0
        return Weighed(loss.detach() * said, slopes.detach(), figures.detach() * said)

    def _losses(self, logps: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss of each example, its reward margin, and whether that is positive."""
        ratios = logps - self.reference_s
        given = self.objective
        if given is None:
            own_ratios = ratios[self.first_e]
            return own_ratios, own_ratios * 0, own_ratios * 0
        if given.gives_scores:
            return self._scored(given, logps)
        beta = given.strength
        if not given.is_paired:
            return _kto(given, ratios[self.first_e], self.weight_e, self.baseline)
        first, second = self.first_e, self.second_e
        means = logps / counts
        if given.kind in ("dpo", "hinge"):
            rewards = beta * ratios
        elif given.kind == "ipo":
            rewards = ratios / counts
        else:
            rewards = beta * means
        margins = rewards[first] - rewards[second]
        losses = _pair_losses(given, margins, means[first], means[second])
        if given.own_loss:
            losses = losses - given.own_loss * means[first]
        return losses * self.weight_e, margins, (margins > 0).float()

    def _scored(self, given: Objective, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return how likely each pair's order is by its scores, −log."""
        chosen, rejected = scores[self.first_e], scores[self.second_e]
        ahead = chosen - rejected
        losses = -F.logsigmoid(ahead - self.reference_s[self.first_e])
        losses = losses + given.centre * (chosen + rejected).square()
        return losses * self.weight_e, ahead, (ahead > 0).float()


def _pair_losses(given: Objective, margins: Tensor, chosen: Tensor, rejected: Tensor) -> Tensor:
    """Return the losses of pairs; `chosen` and `rejected` are mean log-probabilities."""
    if given.kind == "ipo":
        return (margins - 1.0 / (2.0 * given.strength)).square()
    if given.kind == "hinge":
        return torch.relu(1.0 - margins)
    if given.kind == "orpo":
        odds = (chosen - rejected) - (_log_without(chosen) - _log_without(rejected))
        return -given.strength * F.logsigmoid(odds)
    if given.kind == "simpo":
        margins = margins - given.lead
    smooth = given.label_smoothing
    return -(1.0 - smooth) * F.logsigmoid(margins) - smooth * F.logsigmoid(-margins)


def _log_without(logp: Tensor) -> Tensor:
    """Return log(1 − exp(x)) for x < 0, without losing what is left of either term."""
    below = logp.clamp_max(-torch.finfo(logp.dtype).tiny)
    small = below > -0.6931471805599453
    near = torch.log(-torch.expm1(torch.where(small, below, -1.0)))
    far = torch.log1p(-torch.exp(torch.where(small, -1.0, below)))
    return torch.where(small, near, far)


def _kto(
    given: Objective, ratios: Tensor, weights: Tensor, baseline: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the losses of single answers; the weight's sign says whether one is wanted."""
    wanted = torch.sign(weights)
    ahead = given.strength * (ratios - baseline) * wanted
    kinds = torch.where(weights > 0, given.desirable_weight, given.undesirable_weight)
    losses = (1.0 - torch.sigmoid(ahead)) * kinds * weights.abs()
    return losses, given.strength * ratios * wanted, (ahead > 0).float()
