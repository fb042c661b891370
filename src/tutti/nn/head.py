"""Unit L+1: final norm, projection, logits with their loss, and extra prediction heads.

An extra head n (counted from 0) predicts the token n + 2 ahead: it joins the norms of the embedding
of the token n + 1 ahead and of the stream before it (for head 0 the model's, before the final
norm), projects them, and runs one more block; logits and embedding are the model's own
(DeepSeek-V3 §2.2).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from tutti.accelerator.gradients import WeightGradients
from tutti.accelerator.reference.distilled import Given, distilled_cross_entropy
from tutti.accelerator.reference.loss import Vocabulary
from tutti.accelerator.reference.preference_losses import Answers
from tutti.accelerator.reference.sampled_answers import SampledAnswers
from tutti.models import ModelSpec
from tutti.nn.batch import Batch
from tutti.nn.block import Block
from tutti.nn.embedding import TokenTable
from tutti.nn.linear import Linear
from tutti.nn.norm import Norm
from tutti.nn.parallel.collectives import SlicedVocabulary, enter, gather_columns
from tutti.nn.parallel.groups import shares
from tutti.nn.storage import Holder, Maker


class HeadOutput(NamedTuple):
    """Sums of token losses; the tokens' own have no gradient."""

    loss: Tensor
    losses_t: Tensor
    predictions_n: Tensor | None  # the sum of each extra prediction head
    balance: Tensor | None  # of the extra heads' routers
    figures: Tensor | None = None  # of losses on answers: see `Answers`
    logps_s: Tensor | None = None  # of each document, where answers are asked about; or, of
    # sampled ones, of each token


class Logits(Holder):
    """The product with the vocabulary, of which each tensor-parallel rank holds a part."""

    weight: Tensor
    bias: Tensor | None
    quantisable = ("weight",)

    def __init__(self, make: Maker, model: ModelSpec) -> None:
        super().__init__()
        self.operators, self.parallel, self.spec = make.operators, make.parallel, model.head
        self.hold("weight", make, "logits.weight")
        self.hold("bias", make, "logits.bias")
        self.columns = shares(model.vocab, make.parallel.tensor.size)
        start = self.pieces["weight"][0].slices[0].start
        sliced = make.parallel.tensor.size > 1
        self.vocabulary: Vocabulary | None = (
            SlicedVocabulary(make.parallel.tensor, start) if sliced else None
        )

    def loss(
        self,
        x: Tensor,
        targets_t: Tensor,
        weights_t: Tensor | None,
        gradient_scale: float,
        *,
        starts_backward: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return the sum of weighted losses and each token's; x is of this rank's tokens."""
        x = enter(x, self.parallel, targets_t.shape[0])
        return self._entropy(
            x, targets_t, weights_t, gradient_scale, starts_backward=starts_backward
        )

    def answers(
        self, x: Tensor, batch: Batch, gradient_scale: float, *, starts_backward: bool = False
    ) -> HeadOutput:
        """Return a loss on whole answers: their sums first, then tokens weighted by its slope."""
        assert batch.answers is not None
        assert batch.targets_t is not None
        x = enter(x, self.parallel, batch.targets_t.shape[0])
        given = batch.answers
        heat = given.temperature if isinstance(given, SampledAnswers) else 1.0
        with torch.no_grad():
            _, losses_t = self._entropy(x, batch.targets_t, None, gradient_scale, heat=heat)
        logps_s, counts_s = self._sums(losses_t, batch)
        if isinstance(given, SampledAnswers):
            wanted_t = (batch.targets_t >= 0).float()
            tokens = given.weigh(-losses_t, wanted_t, batch.sequence_t, logps_s, counts_s)
            loss, slopes_t, figures, logps = *tokens, -losses_t
        else:
            weighed = given.weigh(logps_s, counts_s)
            slopes_t = weighed.slopes_s[batch.sequence_t]
            loss, figures, logps = weighed.loss, weighed.figures, logps_s
        if torch.is_grad_enabled():
            total, _ = self._entropy(
                x, batch.targets_t, -slopes_t, gradient_scale, starts_backward=starts_backward,
                heat=heat,
            )  # fmt: skip
            loss = total - total.detach() + loss  # the gradient of one, the value of the other
        return HeadOutput(loss, losses_t, None, None, figures, logps)

    def distilled(self, x: Tensor, batch: Batch, gradient_scale: float) -> tuple[Tensor, Tensor]:
        """Return the sum of weighted losses that a teacher has a part in, and each token's."""
        assert batch.taught is not None
        assert batch.targets_t is not None
        given = Given(
            batch.taught.how, batch.taught.told(batch), batch.targets_t, batch.weights_t,
            self.spec.logit_divisor, self.spec.soft_cap, self.vocabulary, gradient_scale,
        )  # fmt: skip
        x = enter(x, self.parallel, batch.targets_t.shape[0])
        return distilled_cross_entropy(x, self.weight, self.bias, given)

    def _sums(self, losses_t: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return each document's log-probability and number of targets, over all ranks' parts."""
        assert batch.targets_t is not None
        numbers = torch.arange(len(batch.lengths), device=losses_t.device)
        own_st = batch.sequence_t == numbers.unsqueeze(1)
        sums = torch.stack(((own_st * -losses_t).sum(1), (own_st * (batch.targets_t >= 0)).sum(1)))
        both = self.parallel.context.all_reduce(sums)
        return both[0], both[1]

    def _entropy(
        self,
        x: Tensor,
        targets_t: Tensor,
        weights_t: Tensor | None,
        gradient_scale: float,
        *,
        starts_backward: bool = False,
        heat: float = 1.0,  # of a distribution that logits are divided for
    ) -> tuple[Tensor, Tensor]:
        return self.operators.linear_cross_entropy(
            x,
            self.weight,
            targets_t,
            bias=self.bias,
            token_weights=weights_t,
            divisor=self.spec.logit_divisor * heat,
            soft_cap=self.spec.soft_cap,
            vocabulary=self.vocabulary,
            gradient_scale=gradient_scale,
            starts_backward=starts_backward,
        )

    def forward(self, x: Tensor, num_tokens: int) -> Tensor:
        """Return the logits of all tokens and the whole vocabulary; no gradients if sliced."""
        return self.whole(self.own(enter(x, self.parallel, num_tokens)))

    def own(self, x: Tensor) -> Tensor:
        """Return the logits of this rank's part of the vocabulary; every rank has all of x."""
        y_tv = self.operators.linear(x, self.weight, self.bias)
        if self.spec.logit_divisor != 1.0:
            y_tv = y_tv / self.spec.logit_divisor
        if self.spec.soft_cap is not None:
            y_tv = self.spec.soft_cap * torch.tanh(y_tv / self.spec.soft_cap)
        return y_tv

    def whole(self, own_tv: Tensor) -> Tensor:
        """Return the logits of the whole vocabulary from the ranks' parts."""
        return gather_columns(own_tv, self.parallel.tensor, self.columns)


class Score(Holder):
    """The product with one vector: a score of each text, read off its last token.

    Every tensor-parallel rank holds it; under sequence parallelism each scores the texts whose last
    token it has.
    """

    weight: Tensor

    def __init__(self, make: Maker) -> None:
        super().__init__()
        self.operators, self.parallel = make.operators, make.parallel
        self.hold("weight", make, "score.weight")

    def answers(self, x: Tensor, batch: Batch) -> HeadOutput:
        """Return a loss on the scores of a batch's texts, and the scores."""
        assert isinstance(batch.answers, Answers)
        rows_s = self._last(batch)
        own_s = self.operators.linear(x[rows_s.clamp_min(0)], self.weight, None).squeeze(1)
        own_s = own_s.float() * (rows_s >= 0)
        scores_s = own_s.detach()
        if self.parallel.sequence_parallel:
            scores_s = self.parallel.tensor.all_reduce(scores_s.clone())
        scores_s = self.parallel.context.all_reduce(scores_s.clone())
        weighed = batch.answers.weigh(scores_s, torch.ones_like(scores_s))
        total = (own_s * weighed.slopes_s).sum()
        loss = total - total.detach() + weighed.loss
        return HeadOutput(loss, torch.zeros_like(own_s), None, None, weighed.figures, scores_s)

    def _last(self, batch: Batch) -> Tensor:
        """Return which of this rank's tokens ends each text; -1: another rank's does."""
        sequence_t, positions_t, tensor = batch.sequence_t, batch.positions_t, self.parallel.tensor
        if self.parallel.sequence_parallel:
            counts = shares(batch.num_tokens, tensor.size)
            cut = slice(sum(counts[: tensor.rank]), sum(counts[: tensor.rank + 1]))
            sequence_t, positions_t = sequence_t[cut], positions_t[cut]
        texts = len(batch.lengths)
        ends = positions_t == batch.lengths_s[sequence_t] - 1
        last_s = sequence_t.new_full((texts + 1,), -1)  # tokens that end nothing: behind the last
        numbers = torch.arange(len(sequence_t), device=sequence_t.device)
        last_s[torch.where(ends, sequence_t, texts)] = numbers
        return last_s[:texts]


class PredictionHead(Holder):
    """One more block, on the stream and the embedding of a token further on."""

    def __init__(self, make: Maker, model: ModelSpec, unit: int) -> None:
        super().__init__()
        spec = model.block(model.num_layers)
        self.embedding_norm = Norm(make, "embedding_norm", spec.norm)
        self.hidden_norm = Norm(make, "hidden_norm", spec.norm)
        self.project = Linear(make, "project")
        self.block = Block(make, model, spec, unit)
        self.norm = Norm(make, "norm", spec.norm)

    def forward(
        self, x: Tensor, embedded: Tensor, batch: Batch, later: WeightGradients | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the stream after this head's block, and its router's balancing loss if any."""
        both = torch.cat((self.embedding_norm(embedded), self.hidden_norm(x)), dim=-1)
        y: tuple[Tensor, Tensor | None] = self.block(self.project(both, later), batch, later)
        return y


class Head(Holder):
    """The stream to logits and losses; a reward model's to scores."""

    logits: Logits

    def __init__(self, make: Maker, model: ModelSpec) -> None:
        super().__init__()
        self.norm = Norm(make, "norm", model.head.norm) if model.head.norm is not None else None
        wide = model.embedding.dim == model.hidden
        self.project_out = None if wide else Linear(make, "project_out")
        self.scores = Score(make) if model.head.scores else None
        if self.scores is None:
            self.logits = Logits(make, model)
        self.token: TokenTable | None = None
        if model.prediction_heads:
            self.token = TokenTable(make, "prediction.token", padding=model.embedding.padding)
        self.predictions = nn.ModuleList(
            PredictionHead(make.under(f"prediction.{head}"), model, model.head_unit + head)
            for head in range(model.prediction_heads)
        )
        self.embedding_scale = float(torch.tensor(model.embedding.scale, dtype=make.dtype))

    def hidden(self, x: Tensor, later: WeightGradients | None = None) -> Tensor:
        """Return what the logits are made of."""
        x = x if self.norm is None else self.norm(x)
        return x if self.project_out is None else self.project_out(x, later)

    def forward(
        self,
        x: Tensor,
        batch: Batch,
        later: WeightGradients | None = None,
        *,
        gradient_scale: float = 1.0,
        starts_backward: bool = False,
    ) -> HeadOutput:
        """Return the losses of a batch.

        Who sets `starts_backward` promises a gradient of `gradient_scale` for the loss.
        """
        if batch.targets_t is None:
            raise ValueError("the batch has no targets; give them to Batch.of, or ask for logits")
        if self.scores is not None:
            return self.scores.answers(self.hidden(x, later), batch)
        if batch.answers is not None:
            return self.logits.answers(
                self.hidden(x, later), batch, gradient_scale, starts_backward=starts_backward
            )
        if batch.taught is not None:
            distilled = self.logits.distilled(self.hidden(x, later), batch, gradient_scale)
            return HeadOutput(*distilled, None, None)
        loss, losses_t = self.logits.loss(
            self.hidden(x, later),
            batch.targets_t,
            batch.weights_t,
            gradient_scale,
            starts_backward=starts_backward,
        )
        predictions, balances = [], []
        for n, head in enumerate(self.predictions):
            assert isinstance(head, PredictionHead)
            assert self.token is not None
            assert batch.next_tokens_nt is not None
            assert batch.next_targets_nt is not None
            embedded = self.token(batch.next_tokens_nt[n]) * self.embedding_scale
            x, balance = head(x, embedded, batch, later)
            total, _ = self.logits.loss(
                head.norm(x), batch.next_targets_nt[n], batch.weights_t, gradient_scale
            )
            predictions.append(total)
            balances += [] if balance is None else [balance]
        return HeadOutput(
            loss,
            losses_t,
            torch.stack(predictions) if predictions else None,
            torch.stack(balances).sum() if balances else None,
        )
