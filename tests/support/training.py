"""Trains a plan with ranks as threads, and the same model in one process, on the same tokens."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tests.support.threads import ThreadLinks, World
from tutti.accelerator import open_accelerator
from tutti.accelerator.reference.optimizer import AdamSettings, adamw
from tutti.models.spec import ModelSpec
from tutti.nn.batch import Batch
from tutti.nn.initialize import initialize
from tutti.nn.model import Model
from tutti.plan.job import PRECISIONS
from tutti.plan.plan import Plan
from tutti.train.engine import Engine
from tutti.train.seats import Seat


def sample(spec: ModelSpec, step: int, index: int, length: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one sequence of one step."""
    generator = torch.Generator().manual_seed(1_000_003 * step + index)
    tokens = torch.randint(spec.vocab, (length + 1,), generator=generator)
    return tokens[:-1], tokens[1:]


def batch_of(spec: ModelSpec, step: int, indices: range, length: int) -> Batch:
    pairs = [sample(spec, step, index, length) for index in indices]
    return Batch.of(
        spec,
        torch.cat([tokens for tokens, _ in pairs]),
        [length] * len(pairs),
        targets_t=torch.cat([targets for _, targets in pairs]),
    )


def first_index(plan: Plan, seat: Seat, micro_batch: int) -> int:
    """The first sequence of the step that a rank computes in a micro-batch."""
    before = sum(p.sequences for p in plan.pipelines[: seat.place.pipeline])
    size = plan.pipelines[seat.place.pipeline].micro_batch
    return before + micro_batch * size + seat.first_sequence


def in_fp32(plan: Plan, optimizer: str) -> Plan:
    job = replace(plan.job, precision=PRECISIONS["fp32"], optimizer=optimizer)
    return replace(plan, job=job)


def settings(learning_rate: float = 1e-2) -> AdamSettings:
    return AdamSettings(learning_rate=learning_rate, weight_decay=0.1)


def train_threads(
    plan: Plan, spec: ModelSpec, steps: int = 3, clip: float | None = 1.0
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Return losses, gradient norms and all weights after the steps."""

    def one(links: ThreadLinks) -> tuple[list[float], list[float], list]:
        engine = Engine(plan, spec, links.rank, open_accelerator("cpu"), links, clip_norm=clip)
        initialize(engine.model, seed=1, deviation=0.1)  # type: ignore[arg-type]
        engine.take_masters()
        losses, norms = [], []
        for step in range(steps):

            def batches(micro_batch: int, step: int = step) -> Batch:
                first = first_index(plan, engine.seat, micro_batch)
                indices = range(first, first + engine.seat.replica.sequences)
                whole = batch_of(spec, step, indices, plan.job.sequence_length)
                return whole.share(spec, engine.seat.replica.cp, engine.seat.place.cp)

            result = engine.step(batches, settings())
            losses.append(result.loss)
            norms.append(result.gradient_norm)
        return losses, norms, [engine.weights()]

    results = World(plan.num_ranks).run(one)
    weights: dict[str, Tensor] = {}
    for _, _, (own,) in results:
        for name, slices, value in own:
            whole = weights.setdefault(name, _nan(spec, name))
            old = whole[slices]
            both = ~torch.isnan(old) & ~torch.isnan(value)
            worst = (old[both] - value[both]).abs().max() if both.any() else 0.0
            assert torch.equal(old[both], value[both]), f"ranks disagree on {name} by {worst}"
            whole[slices] = torch.where(torch.isnan(value), old, value)
    assert all(losses == results[0][0] for losses, _, _ in results)
    return results[0][0], results[0][1], weights


def _nan(spec: ModelSpec, name: str) -> Tensor:
    unit, _, rest = name.partition(".")
    shape = next(p.shape for p in spec.parameters(int(unit)) if p.name == rest)
    return torch.full(shape, float("nan"))


def train_alone(
    plan: Plan, spec: ModelSpec, steps: int = 3, clip: float | None = 1.0
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """The same in one process, with torch's autograd as it is."""
    model = Model(spec, open_accelerator("cpu").operators)
    initialize(model, seed=1, deviation=0.1)
    parameters = [p for p in model.parameters() if p.requires_grad]
    means, squares = ([torch.zeros_like(p) for p in parameters] for _ in range(2))
    losses, norms = [], []
    for step in range(steps):
        loss_sum, balance_sum, tokens = 0.0, 0.0, 0
        for index in range(plan.job.global_batch):
            batch = batch_of(spec, step, range(index, index + 1), plan.job.sequence_length)
            output = model(None, batch)
            total = output.loss if output.balance is None else output.loss + output.balance
            total.backward()
            loss_sum += float(output.loss.detach())
            balance_sum += 0.0 if output.balance is None else float(output.balance.detach())
            tokens += batch.num_tokens
        norm = sum(float(p.grad.double().square().sum()) for p in parameters) ** 0.5 / tokens
        factor = torch.tensor((clip / norm if clip and norm > clip else 1.0) / tokens)
        gradients = [p.grad for p in parameters]
        given = settings()
        if plan.job.optimizer == "adamw":
            adamw(
                [p.data for p in parameters], gradients, means, squares, step=step + 1,
                settings=given, gradient_factor=factor,
            )  # fmt: skip
        else:
            for p in parameters:
                p.data.mul_(1 - given.learning_rate * given.weight_decay)
                p.data.sub_(given.learning_rate * factor * p.grad)
        for p in parameters:
            p.grad = None
        losses.append(loss_sum / tokens)
        norms.append(norm)
    return losses, norms, {t.name: t.view for t in model.logical_tensors()}
