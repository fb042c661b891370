"""Sampled answers, trained under a plan and by plain autograd over logits."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.threads import World
from tests.support.training import Trained, engine_of, put_together, record_gradients, settings
from tutti.accelerator import open_accelerator
from tutti.models.objective import Objective
from tutti.models.sampling import Sampling
from tutti.models.spec import ModelSpec
from tutti.nn.batch import Batch
from tutti.nn.initialize import initialize
from tutti.nn.model import Model
from tutti.plan.plan import Plan
from tutti.recipes.reinforcement.sampled_rows import Answered, SampledBatch, pack, token_logps
from tutti.recipes.reinforcement.weights import HeldWeights, hand_over


def sampled_batch(plan: Plan, spec: ModelSpec, *, temperature: float = 1.0) -> SampledBatch:
    """Answers of many lengths with advantages; some groups are left out, one row may be blank."""
    rows, length = plan.job.global_batch, plan.job.sequence_length
    numbers = np.random.default_rng(5)
    answered = [
        Answered(
            tuple(numbers.integers(0, spec.vocab, numbers.integers(1, 4)).tolist()),
            tuple(numbers.integers(0, spec.vocab, numbers.integers(1, length // 2 - 3)).tolist()),
        )
        for _ in range(2 * rows - 2)
    ]
    count = len(answered)
    like = SampledBatch(
        rows=pack(answered, rows=rows, length=length, pad=0),
        advantages=numbers.normal(size=count).astype(np.float32),
        counted=np.arange(count) % 5 != 3,
        temperature=temperature,
    )
    noise = torch.from_numpy(numbers.normal(size=(2, rows, length)).astype(np.float32))
    like = replace(like, old=noise[0], reference=noise[1])
    any_objective = Objective(kind="grpo", sampling=Sampling(rewards=("a:b",)))
    logps = plain_sampled(plan, spec, any_objective, like)[1]
    return replace(like, old=logps + 0.1 * noise[0], reference=logps + 0.3 * noise[1])


@dataclass
class Found(Trained):
    logps: Any = None
    again: Any = None  # of the first weights, after a step
    handed: dict[str, Tensor] = field(default_factory=dict)


def train_sampled(plan: Plan, spec: ModelSpec, objective: Objective, batch: SampledBatch) -> Found:
    """Two steps on a batch, with ranks as threads; then what each hands over and holds."""

    def one(links: Any) -> Found:
        engine = engine_of(plan, spec, links)
        found = Found([], [], [], [])
        held = HeldWeights(engine)
        found.logps = token_logps(engine, batch)
        record_gradients(engine, found.gradients)
        for _ in range(2):
            result = engine.step(batch.batches(engine, objective), settings())
            found.losses.append(result.loss)
            found.norms.append(result.gradient_norm)
        found.weights = engine.weights()
        with held.in_place():
            found.again = token_logps(engine, batch)
        model = Model(spec, engine.accelerator.operators)
        ranks = tuple(range(plan.num_ranks))

        def add(flat: Tensor) -> None:
            if len(ranks) > 1:
                links.all_reduce(ranks, flat, use="scalars").wait()

        hand_over(engine, spec, model, add, torch.float32, torch.device("cpu"))
        found.handed = {t.name: t.view.clone() for t in model.logical_tensors()}
        return found

    ranks = World(plan.num_ranks).run(one)
    joined = put_together(spec, ranks)
    for own in ranks[1:]:
        assert torch.equal(own.logps, ranks[0].logps)
        assert all(torch.equal(own.handed[name], value) for name, value in ranks[0].handed.items())
    return Found(
        joined.losses, joined.norms, joined.weights, joined.gradients,
        logps=ranks[0].logps, again=ranks[0].again, handed=ranks[0].handed,
    )  # fmt: skip


def plain_sampled(
    plan: Plan, spec: ModelSpec, objective: Objective, batch: SampledBatch
) -> tuple[Trained, Tensor]:
    """The first step as the papers write it: each answer alone, all logits at hand."""
    model = Model(spec, open_accelerator("cpu").operators)
    initialize(model, seed=1, deviation=0.1)
    total, count = torch.zeros(()), 0
    logps = torch.zeros(plan.job.global_batch, plan.job.sequence_length)
    for number, row in enumerate(batch.rows):
        at = 0
        for member, size in zip(row.members, row.lengths, strict=False):
            own = slice(at, at + size)
            tokens = torch.from_numpy(row.tokens[own])
            targets = torch.from_numpy(row.targets[own])
            wanted = targets >= 0
            logits = model.logits(Batch.of(spec, tokens, [size])).float() / batch.temperature
            found = F.log_softmax(logits, -1)[wanted].gather(1, targets[wanted][:, None])[:, 0]
            logps[number, own][wanted] = found.detach()
            if batch.counted[member]:
                given = (batch.old[number, own][wanted], batch.reference[number, own][wanted])
                total = total + _loss(objective, found, *given, float(batch.advantages[member]))
                count += 1
            at += size
    mean = total / count
    mean.backward()
    named = {t.name: t.gradient.clone() for t in model.logical_tensors() if t.gradient is not None}
    return Trained([float(mean.detach())], [], {}, named), logps


def _loss(
    objective: Objective, logps: Tensor, old: Tensor, reference: Tensor, advantage: float
) -> Tensor:
    given = objective.sampling
    if objective.kind == "rloo":
        logps, old = logps.sum(), old.sum()
    ratio = torch.exp(logps - old)
    clipped = torch.clamp(ratio, 1 - given.clip, 1 + given.highest)
    loss = -torch.min(ratio * advantage, clipped * advantage)
    if objective.kind == "grpo":
        apart = torch.exp(reference - logps) - (reference - logps) - 1
        loss = loss + objective.strength * apart
    return loss.mean()
