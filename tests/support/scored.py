"""Reward models by plain autograd: every text alone, scored at its last token, as TRL's loss."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from tests.support.preferred import Documents
from tests.support.training import Trained
from tutti.accelerator import open_accelerator
from tutti.models.objective import Objective
from tutti.models.spec import ModelSpec
from tutti.nn.batch import Batch
from tutti.nn.initialize import initialize
from tutti.nn.model import Model
from tutti.plan.plan import Plan


def plain_scores_step(plan: Plan, spec: ModelSpec, objective: Objective) -> Trained:
    """The first step's loss and gradients; margins are what `Documents` holds answers against."""
    model = Model(spec, open_accelerator("cpu").operators)
    initialize(model, seed=1, deviation=0.1)
    assert model.head is not None
    assert model.head.scores is not None
    total, count = torch.zeros(()), 0
    for index in range(plan.job.global_batch):
        row = Documents(spec, objective, 0, index, plan.job.sequence_length)
        scores = []
        for tokens in row.tokens.split(row.lengths):
            stream, _ = model.stream(None, Batch.of(spec, tokens, [len(tokens)]))
            hidden = model.head.hidden(stream)
            scores.append(F.linear(hidden[-1], model.head.scores.weight)[0])
        for at in range(0, len(scores) - 1, 2):
            if not row.weights[at]:
                continue
            chosen, rejected = scores[at], scores[at + 1]
            # as TRL's RewardTrainer has it, times the weight of the pair
            loss = -F.logsigmoid(chosen - rejected - row.references[at])
            loss = loss + objective.centre * (chosen + rejected) ** 2
            total, count = total + loss * row.weights[at], count + 1
    mean = total / count
    mean.backward()
    named = {t.name: t.gradient.clone() for t in model.logical_tensors() if t.gradient is not None}
    return Trained([float(mean.detach())], [], {}, named)
