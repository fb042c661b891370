"""Losses on answers that the model sampled itself: GRPO and RLOO.

GRPO (Shao et al. 2024) weighs every token: with r the ratio of its probability to that under which
it was sampled and A its answer's advantage, its loss is −min(r·A, clip(r)·A), plus β times an
estimate of the divergence from the reference; an answer's loss is the mean of its tokens'. RLOO
(Ahmadian et al. 2024) does the same with the probability of the whole answer, and has the
divergence in the reward. Either is a function of log-probabilities with a slope at each token, and
so the head runs the same cross-entropy with these slopes as weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from tutti.accelerator.host_to_device import moved
from tutti.models.objective import Objective


class WeighedTokens(NamedTuple):
    """What a loss on sampled answers comes to."""

    loss: Tensor  # the sum over this rank's tokens of the answers' means
    slopes_t: Tensor  # ∂loss / ∂log-probability of each token
    figures: Tensor  # sums over the answers: divergence from the reference, share clipped


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledAnswers:
    """The sampled answers of a batch: advantages, and what their tokens had of probability.

    Without an objective only the tokens' log-probabilities are asked for.
    """

    objective: Objective | None
    present_s: Tensor  # 1 for answers, 0 for what fills rows up
    advantage_s: Tensor
    old_t: Tensor | None  # log-probabilities when they were sampled; None: as they are now
    old_s: Tensor | None  # their sums
    reference_t: Tensor | None
    place_t: Tensor  # of each token among those of all ranks that share out the rows
    temperature: float = 1.0
    num_answers: int = 0
    speaks: bool = True  # whether this rank counts: one of those that share out the rows

    @classmethod
    def of(
        cls,
        objective: Objective | None,
        advantages: Sequence[float],
        present: Sequence[bool],
        *,
        tokens: int,
        device: torch.device,
        old: Tensor | None = None,
        old_sums: Sequence[float] | None = None,
        reference: Tensor | None = None,
        temperature: float = 1.0,
    ) -> SampledAnswers:
        """Take the documents of a batch, and the log-probabilities of all its tokens."""
        return cls(
            objective=objective,
            present_s=moved(torch.tensor(list(present), dtype=torch.float32), device),
            advantage_s=moved(torch.tensor(list(advantages), dtype=torch.float32), device),
            old_t=None if old is None else moved(old, device),
            old_s=None if old_sums is None else moved(torch.tensor(list(old_sums)), device),
            reference_t=None if reference is None else moved(reference, device),
            place_t=moved(torch.arange(tokens), device),
            temperature=temperature,
            num_answers=sum(present),
        )

    @property
    def count(self) -> int:
        """Examples, as far as this rank counts them."""
        return self.num_answers if self.speaks else 0

    def of_rows(self, own: Tensor, *, speaks: bool) -> SampledAnswers:
        """Return the part of a rank that shares rows with others: some of the tokens."""
        return replace(
            self,
            old_t=None if self.old_t is None else self.old_t[own],
            reference_t=None if self.reference_t is None else self.reference_t[own],
            place_t=self.place_t[own],
            speaks=speaks,
        )

    def weigh(
        self,
        logps_t: Tensor,
        supervised_t: Tensor,
        sequence_t: Tensor,
        logps_s: Tensor,
        counts_s: Tensor,
    ) -> WeighedTokens:
        """Return loss and slopes; `logps_s` and `counts_s` are of whole answers."""
        if self.objective is None:
            return WeighedTokens(logps_t.new_zeros(()), torch.zeros_like(logps_t), _none(logps_t))
        share_t = supervised_t * (self.present_s / counts_s.clamp_min(1.0))[sequence_t]
        if self.objective.kind == "rloo":
            return self._whole(self.objective, logps_s, sequence_t, supervised_t)
        return self._tokens(self.objective, logps_t, share_t, self.advantage_s[sequence_t])

    def _tokens(
        self, given: Objective, logps_t: Tensor, share_t: Tensor, advantage_t: Tensor
    ) -> WeighedTokens:
        """GRPO: every token by its own ratio."""
        with torch.enable_grad():
            logps = logps_t.detach().clone().requires_grad_()
            ratio = torch.exp(logps - (logps.detach() if self.old_t is None else self.old_t))
            losses, clipped = _clipped(given, ratio, advantage_t)
            apart = torch.zeros_like(logps)
            if self.reference_t is not None:
                behind = self.reference_t - logps
                apart = torch.exp(behind) - behind - 1.0
                losses = losses + given.strength * apart
            loss = (losses * share_t).sum()
            (slopes,) = torch.autograd.grad(loss, logps)
        figures = torch.stack(((apart.detach() * share_t).sum(), (clipped * share_t).sum()))
        return WeighedTokens(loss.detach(), slopes.detach(), figures)

    def _whole(
        self, given: Objective, logps_s: Tensor, sequence_t: Tensor, supervised_t: Tensor
    ) -> WeighedTokens:
        """RLOO: every answer by its own ratio, the same slope at each of its tokens."""
        with torch.enable_grad():
            logps = logps_s.detach().clone().requires_grad_()
            ratio = torch.exp(logps - (logps.detach() if self.old_s is None else self.old_s))
            losses, clipped = _clipped(given, ratio, self.advantage_s)
            loss = (losses * self.present_s).sum()
            (slopes,) = torch.autograd.grad(loss, logps)
        figures = torch.stack((loss.detach() * 0, (clipped * self.present_s).sum()))
        said = 1.0 if self.speaks else 0.0
        slopes_t = slopes.detach()[sequence_t] * supervised_t
        return WeighedTokens(loss.detach() * said, slopes_t, figures * said)


def _clipped(given: Objective, ratio: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
    """Return the clipped losses, and 1 where the clip decides."""
    assert given.sampling is not None
    low, high = 1.0 - given.sampling.clip, 1.0 + given.sampling.highest
    losses = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    falls, rises = (ratio < low) & (advantage < 0), (ratio > high) & (advantage > 0)
    return losses, (falls | rises).float()


def _none(like: Tensor) -> Tensor:
    return like.new_zeros(2)
