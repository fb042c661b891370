"""Trains a plan, rank by rank, and the same model in one process, on the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.routing import NEAR, Routing, RoutingWatcher, Token, rerouted
from tests.support.threads import World
from tutti.accelerator import open_accelerator
from tutti.accelerator.reference.optimizer import AdamSettings, adamw
from tutti.models.spec import ModelSpec
from tutti.nn.batch import Batch
from tutti.nn.initialize import initialize
from tutti.nn.model import Model
from tutti.plan.job import PRECISIONS
from tutti.plan.plan import Plan
from tutti.schedule.instruction import Instruction, Op
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


@dataclass
class Trained:
    """What a training came to: on one rank, its own parts; put together, everything."""

    losses: list[float]
    norms: list[float]
    weights: Any  # parts, or tensors by name, as are the first step's gradients
    gradients: Any
    routing: Routing = field(default_factory=dict)
    groups: tuple[Any, ...] = ()  # that were made beside those foreseen


def train_rank(
    plan: Plan, spec: ModelSpec, links: Any, steps: int = 3, clip: float | None = 1.0
) -> Trained:
    """Train as one rank of a plan."""
    engine = Engine(plan, spec, links.rank, open_accelerator("cpu"), links, clip_norm=clip)
    initialize(engine.model, seed=1, deviation=0.1)  # type: ignore[arg-type]
    engine.take_masters()
    found = Trained([], [], [], [])
    watcher = RoutingWatcher(engine.model.by_number(), engine.seat.tensor.rank, found.routing)
    record_gradients(engine, found.gradients)
    for step in range(steps):

        def batches(micro_batch: int, step: int = step) -> Batch:
            first = first_index(plan, engine.seat, micro_batch)
            indices = range(first, first + engine.seat.replica.sequences)
            whole = batch_of(spec, step, indices, plan.job.sequence_length)
            batch = whole.share(spec, engine.seat.replica.cp, engine.seat.place.cp)
            watcher.expect(batch, step, first)
            return batch

        result = engine.step(batches, settings())
        found.losses.append(result.loss)
        found.norms.append(result.gradient_norm)
    found.weights = engine.weights()
    return found


def record_gradients(engine: Engine, parts: list[Any]) -> None:
    """Keep the gradients of the first step, as the optimizer is about to take them."""
    clip_norm = engine._handlers[Op.CLIP_NORM]

    def recording(entry: Instruction) -> Any:
        handle = clip_norm(entry)
        if not parts:
            tokens = engine._result.tokens
            for state in engine.parameters.all_states():
                flat = torch.full((state.span.size,), float("nan"))
                flat[state.kept] = state.total.cpu().float() / tokens
                pieces = flat.split([block.size for block in state.span.blocks])
                for block, piece in zip(state.span.blocks, pieces, strict=True):
                    slices = tuple(slice(*interval) for interval in block.intervals)
                    parts.append((f"{block.unit}.{block.name}", slices, piece.view(block.shape)))
        return handle

    engine._handlers = {**engine._handlers, Op.CLIP_NORM: recording}


def train_threads(plan: Plan, spec: ModelSpec, steps: int = 3, clip: float | None = 1.0) -> Trained:
    """Train with ranks as threads."""
    return put_together(
        spec, World(plan.num_ranks).run(lambda links: train_rank(plan, spec, links, steps, clip))
    )


def put_together(spec: ModelSpec, ranks: Sequence[Trained]) -> Trained:
    """Join what all ranks have; those that have the same must agree."""
    assert all(found.losses == ranks[0].losses for found in ranks)
    return Trained(
        ranks[0].losses,
        ranks[0].norms,
        _whole(spec, [part for found in ranks for part in found.weights], "weights"),
        _whole(spec, [part for found in ranks for part in found.gradients], "gradients"),
        {key: value for found in ranks for key, value in found.routing.items()},
        tuple(group for found in ranks for group in found.groups),
    )


def _whole(spec: ModelSpec, parts: list[Any], what: str) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, slices, value in parts:
        value = torch.as_tensor(value)
        whole = tensors.setdefault(name, _nan(spec, name))
        old = whole[slices]
        both = ~torch.isnan(old) & ~torch.isnan(value)
        worst = (old[both] - value[both]).abs().max() if both.any() else 0.0
        assert torch.equal(old[both], value[both]), f"ranks disagree on {what} {name} by {worst}"
        whole[slices] = torch.where(torch.isnan(value), old, value)
    return tensors


def _nan(spec: ModelSpec, name: str) -> Tensor:
    unit, _, rest = name.partition(".")
    shape = next(p.shape for p in spec.parameters(int(unit)) if p.name == rest)
    return torch.full(shape, float("nan"))


def train_alone(plan: Plan, spec: ModelSpec, steps: int = 3, clip: float | None = 1.0) -> Trained:
    """The same in one process, with torch's autograd as it is."""
    model = Model(spec, open_accelerator("cpu").operators)
    initialize(model, seed=1, deviation=0.1)
    parameters = [p for p in model.parameters() if p.requires_grad]
    means, squares = ([torch.zeros_like(p) for p in parameters] for _ in range(2))
    found = Trained([], [], {}, {})
    units = {0: model.embedding, **dict(enumerate(model.blocks, 1)), spec.head_unit: model.head}
    watcher = RoutingWatcher(units, 0, found.routing)
    for step in range(steps):
        loss_sum, balance_sum, tokens = 0.0, 0.0, 0
        for index in range(plan.job.global_batch):
            batch = batch_of(spec, step, range(index, index + 1), plan.job.sequence_length)
            watcher.expect(batch, step, index)
            output = model(None, batch)
            total = output.loss if output.balance is None else output.loss + output.balance
            total.backward()
            loss_sum += float(output.loss.detach())
            balance_sum += 0.0 if output.balance is None else float(output.balance.detach())
            tokens += batch.num_tokens
        norm = sum(float(p.grad.double().square().sum()) for p in parameters) ** 0.5 / tokens
        factor = torch.tensor((clip / norm if clip and norm > clip else 1.0) / tokens)
        gradients = [p.grad for p in parameters]
        if step == 0:
            found.gradients = {
                t.name: t.gradient / tokens
                for t in model.logical_tensors()
                if t.gradient is not None
            }
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
        found.losses.append(loss_sum / tokens)
        found.norms.append(norm)
    found.weights = {t.name: t.view for t in model.logical_tensors()}
    return found


def assert_same(found: Trained, expected: Trained, optimizer: str) -> dict[Token, float]:
    """Raise unless a training is that of a single process; return tokens at a near-tie.

    A token may go to other experts where its choice hung on rounding; then all that follows may
    differ a little, and only the losses are compared, to a thousandth.
    """
    moved = rerouted(found.routing, expected.routing)
    assert all(margin < NEAR for margin in moved.values()), f"rerouted: {moved}"
    assert found.losses == pytest.approx(expected.losses, rel=1e-3 if moved else 1e-5)
    assert not any(torch.isnan(value).any() for value in found.weights.values())
    assert found.weights.keys() >= expected.weights.keys()
    if not any(step == 0 for step, *_ in moved):
        # under AdamW the second step's gradients already differ by what the first one amplified
        assert found.norms[:1] == pytest.approx(expected.norms[:1], rel=1e-5)
        _assert_close(found.gradients, expected.gradients, "gradient of")
    if optimizer == "sgd" and not moved:
        _assert_close(found.weights, expected.weights, "weights")
    return moved


def _assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    for name, value in expected.items():
        error = float((found[name] - value).norm() / value.norm().clamp_min(1e-9))
        assert error <= 1e-5, f"{what} {name}: {error:.1e} of its norm"
