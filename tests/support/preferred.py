"""Rows of answers, trained under a plan and by plain autograd over logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.threads import World
from tests.support.training import (
    Trained,
    engine_of,
    first_index,
    put_together,
    record_gradients,
    settings,
)
from tutti.accelerator import open_accelerator
from tutti.accelerator.reference.preference_losses import Answers
from tutti.models.objective import Objective
from tutti.models.spec import ModelSpec
from tutti.nn.batch import NO_TARGET, Batch
from tutti.nn.initialize import initialize
from tutti.nn.model import Model
from tutti.plan.plan import Plan
from tutti.train.engine.engine import Engine

Losses = Callable[..., Tensor]  # of log-probabilities, references, token counts; see `written_out`


class Documents:
    """The answers of one row: tokens, which of them are targets, weights, references."""

    def __init__(self, spec: ModelSpec, objective: Objective, step: int, index: int, length: int):
        generator = torch.Generator().manual_seed(7_907 * step + index)

        def number(low: int, high: int) -> int:
            return int(torch.randint(low, high, (1,), generator=generator))

        self.lengths: list[int] = []
        self.weights: list[float] = []
        left = length
        while left >= 8 and len(self.lengths) < 4:
            own = [number(3, left // 2 + 1) for _ in range(1 + objective.is_paired)]
            weight = 0.5 + number(0, 3) / 2
            sign = 1.0 if objective.is_paired or number(0, 2) else -1.0
            self.weights += [weight, -weight] if objective.is_paired else [weight * sign]
            self.lengths += own
            left -= sum(own)
        if left:
            self.lengths.append(left)
            self.weights.append(0.0)
        self.tokens = torch.randint(spec.vocab, (length,), generator=generator)
        self.references = [-float(number(5, 60)) / 4 for _ in self.lengths]
        self.targets = torch.full((length,), NO_TARGET)
        at = 0
        for own, weight in zip(self.lengths, self.weights, strict=True):
            prompt = number(0, max(1, own - 1))
            if weight:
                where = slice(at + prompt, at + own - 1)
                self.targets[where] = self.tokens[at + prompt + 1 : at + own]
            at += own


def batch_of_answers(
    spec: ModelSpec, objective: Objective, step: int, indices: range, length: int
) -> Batch:
    """Some rows of a step."""
    rows = [Documents(spec, objective, step, index, length) for index in indices]
    weights = [weight for row in rows for weight in row.weights]
    references = [value for row in rows for value in row.references]
    answers = Answers.of(objective, weights, references, torch.device("cpu"))
    return Batch.of(
        spec,
        torch.cat([row.tokens for row in rows]),
        [own for row in rows for own in row.lengths],
        targets_t=torch.cat([row.targets for row in rows]),
        row_length=length,
        answers=answers,
    )


def train_answers(plan: Plan, spec: ModelSpec, objective: Objective, steps: int = 2) -> Trained:
    """Train a plan with ranks as threads."""

    def one(links: Any) -> Trained:
        engine = engine_of(plan, spec, links)
        found = Trained([], [], [], [])
        record_gradients(engine, found.gradients)
        for step in range(steps):
            result = engine.step(_batches(engine, objective, step), settings())
            found.losses.append(result.loss)
            found.norms.append(result.gradient_norm)
        found.weights = engine.weights()
        return found

    return put_together(spec, World(plan.num_ranks).run(one))


def _batches(engine: Engine, objective: Objective, step: int) -> Callable[[int], Batch]:
    plan, spec, seat = engine.plan, engine.spec, engine.seat

    def batches(micro_batch: int) -> Batch:
        first = first_index(plan, seat, micro_batch)
        indices = range(first, first + seat.replica.sequences)
        whole = batch_of_answers(spec, objective, step, indices, plan.job.sequence_length)
        return whole.share(spec, seat.replica.cp, seat.place.cp)

    return batches


def plain_step(plan: Plan, spec: ModelSpec, objective: Objective, losses: Losses) -> Trained:
    """The first step's loss and gradients, with every answer alone and all logits at hand."""
    model = Model(spec, open_accelerator("cpu").operators)
    initialize(model, seed=1, deviation=0.1)
    total, count = torch.zeros(()), 0
    for index in range(plan.job.global_batch):
        row = Documents(spec, objective, 0, index, plan.job.sequence_length)
        logps, counts, references, weights = [], [], [], []
        pieces = zip(
            row.tokens.split(row.lengths), row.targets.split(row.lengths),
            row.weights, row.references, strict=True,
        )  # fmt: skip
        for tokens, targets, weight, reference in pieces:
            if not weight:
                continue
            logits = model.logits(Batch.of(spec, tokens, [len(tokens)]))
            wanted = targets >= 0
            own = F.log_softmax(logits.float(), -1)[wanted].gather(1, targets[wanted][:, None])
            logps.append(own.sum())
            counts.append(int(wanted.sum()))
            references.append(reference)
            weights.append(weight)
        if logps:
            found = losses(
                torch.stack(logps), torch.tensor(references), torch.tensor(counts),
                torch.tensor(weights),
            )  # fmt: skip
            total, count = total + found.sum(), count + len(found)
    mean = total / count
    mean.backward()
    named = {t.name: t.gradient.clone() for t in model.logical_tensors() if t.gradient is not None}
    return Trained([float(mean.detach())], [], {}, named)
