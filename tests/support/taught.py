"""Models that learn from a teacher: under a plan, and by plain autograd over whole logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.threads import World
from tests.support.training import (
    Trained,
    batch_of,
    batches_of,
    engine_of,
    put_together,
    record_gradients,
    settings,
)
from tutti.accelerator import open_accelerator
from tutti.models.distillation import Distillation
from tutti.models.spec import ModelSpec
from tutti.nn.batch import Batch
from tutti.nn.initialize import initialize
from tutti.nn.model import Model
from tutti.plan.plan import Plan
from tutti.train.engine.engine import Engine
from tutti.train.engine.teacher import StoredTaught, Teacher


def teacher_of(spec: ModelSpec) -> ModelSpec:
    """A model of another depth and the same vocabulary."""
    return replace(spec, num_layers=2, prediction_heads=0)


def train_taught(plan: Plan, spec: ModelSpec, how: Distillation, steps: int = 2) -> Trained:
    """Train a plan with ranks as threads; the teacher lies beside the head, or told earlier."""

    def one(links: Any) -> Trained:
        engine = engine_of(plan, spec, links)
        teacher = None
        if spec.head_unit in engine.seat.units:
            operators = engine.accelerator.operators
            teacher = Teacher(teacher_of(spec), how, operators, engine.context, dtype=torch.float32)
            initialize(teacher.model, seed=7, deviation=0.1)
        found = Trained([], [], [], [])
        record_gradients(engine, found.gradients)
        for step in range(steps):
            result = engine.step(_batches(engine, teacher, step), settings())
            found.losses.append(result.loss)
        found.weights = engine.weights()
        return found

    return put_together(spec, World(plan.num_ranks).run(one))


def _batches(engine: Engine, teacher: Teacher | None, step: int) -> Callable[[int], Batch]:
    own = batches_of(engine, step, packed=True)

    def batches(micro_batch: int) -> Batch:
        batch = own(micro_batch)
        if teacher is None:
            return batch
        if not teacher.how.stored:
            return replace(batch, taught=teacher)
        told = teacher.told(batch)(slice(None))
        assert told.tokens_tk is not None
        assert told.logps_tk is not None
        return replace(batch, taught=StoredTaught(teacher.how, told.tokens_tk, told.logps_tk))

    return batches


def written_out(how: Distillation, logits: Tensor, teaching: Tensor, targets: Tensor) -> Tensor:
    """The loss of each token over whole logits, by the definitions."""
    p = F.softmax(teaching / how.temperature, -1)
    q = F.softmax(logits / how.temperature, -1)
    if how.top_k is not None:
        most = p.topk(how.top_k, -1).indices
        p, q = (
            torch.cat((x.gather(1, most), 1 - x.gather(1, most).sum(1, keepdim=True)), 1)
            for x in (p, q)
        )
    if how.divergence == "forward":
        found = (p * (p / q).log()).sum(1)
    elif how.divergence == "reverse":
        found = (q * (q / p).log()).sum(1)
    else:
        m = how.mixture * p + (1 - how.mixture) * q
        found = how.mixture * (p * (p / m).log()).sum(1)
        found = found + (1 - how.mixture) * (q * (q / m).log()).sum(1)
    labels = F.cross_entropy(logits, targets, reduction="none")
    return how.share * how.temperature**2 * found + (1 - how.share) * labels


def plain_taught_step(plan: Plan, spec: ModelSpec, how: Distillation) -> Trained:
    """The first step's loss and gradients, row by row, with all logits at hand."""
    operators = open_accelerator("cpu").operators
    model, teacher = Model(spec, operators), Model(teacher_of(spec), operators)
    initialize(model, seed=1, deviation=0.1)
    initialize(teacher, seed=7, deviation=0.1)
    total, count = torch.zeros(()), 0
    for index in range(plan.job.global_batch):
        batch = batch_of(spec, 0, range(index, index + 1), plan.job.sequence_length, packed=True)
        assert batch.targets_t is not None
        wanted = batch.targets_t >= 0
        stream, _ = model.stream(None, batch)
        head = model.head
        assert head is not None
        logits = head.logits.own(head.hidden(stream))
        with torch.no_grad():
            teaching = teacher.logits(batch.seen_by(teacher.spec))
        targets = batch.targets_t[wanted]
        total = total + written_out(how, logits[wanted], teaching[wanted], targets).sum()
        count += int(wanted.sum())
    mean = total / count
    mean.backward()
    named = {t.name: t.gradient.clone() for t in model.logical_tensors() if t.gradient is not None}
    return Trained([float(mean.detach())], [], {}, named)
