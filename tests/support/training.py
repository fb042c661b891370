"""Trains a plan, rank by rank, and the same model in one process, on the same tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.routing import NEAR, Routing, RoutingWatcher, Token, rerouted
from tests.support.threads import World
from tutti.accelerator import Accelerator, open_accelerator
from tutti.accelerator.reference.optimizer import AdamSettings, adamw, lion
from tutti.hardware.chip import Dtype
from tutti.models.parameters import ParameterKind
from tutti.models.spec import ModelSpec
from tutti.nn.batch import Batch
from tutti.nn.initialize import initialize
from tutti.nn.model import Model
from tutti.ownership.buckets import tied_apart
from tutti.ownership.ownership import tied_ends
from tutti.plan.job import PRECISIONS
from tutti.plan.plan import Plan
from tutti.ranks.rank_places import Seat
from tutti.schedule.instruction import Instruction, Op
from tutti.train.engine.engine import Batches, Engine
from tutti.train.state.state import TORCH_DTYPES


def sample(spec: ModelSpec, step: int, index: int, length: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one sequence of one step."""
    generator = torch.Generator().manual_seed(1_000_003 * step + index)
    tokens = torch.randint(spec.vocab, (length + 1,), generator=generator)
    return tokens[:-1], tokens[1:]


def documents(step: int, index: int, length: int) -> list[int]:
    """Lengths of the documents that are packed into one row of one step."""
    generator = torch.Generator().manual_seed(7_919 * step + index)
    cuts = (torch.randperm(length - 1, generator=generator)[: index % 4] + 1).sort().values
    bounds = [0, *cuts.tolist(), length]
    return [high - low for low, high in itertools.pairwise(bounds)]


def batch_of(
    spec: ModelSpec, step: int, indices: range, length: int, *, packed: bool = False
) -> Batch:
    """Some rows of a step; with `packed` they hold several documents."""
    pairs = [sample(spec, step, index, length) for index in indices]
    lengths = [documents(step, i, length) if packed else [length] for i in indices]
    return Batch.of(
        spec,
        torch.cat([tokens for tokens, _ in pairs]),
        [own for row in lengths for own in row],
        targets_t=torch.cat([targets for _, targets in pairs]),
        row_length=length,
    )


def separate_batches(
    plan: Plan, spec: ModelSpec, step: int, *, packed: bool
) -> Iterator[tuple[int, Batch]]:
    """The documents of a step, each in a batch of its own, with the number of its row."""
    length = plan.job.sequence_length
    for index in range(plan.job.global_batch):
        tokens, targets = sample(spec, step, index, length)
        lengths = documents(step, index, length) if packed else [length]
        for own, wanted in zip(tokens.split(lengths), targets.split(lengths), strict=True):
            yield index, Batch.of(spec, own, [len(own)], targets_t=wanted)


def first_index(plan: Plan, seat: Seat, micro_batch: int) -> int:
    """The first sequence of the step that a rank computes in a micro-batch."""
    before = sum(p.sequences for p in plan.pipelines[: seat.place.pipeline])
    size = plan.pipelines[seat.place.pipeline].micro_batch
    return before + micro_batch * size + seat.first_sequence


def in_precision(plan: Plan, policy: str, optimizer: str = "adamw") -> Plan:
    job = replace(plan.job, precision=PRECISIONS[policy], optimizer=optimizer)
    return replace(plan, job=job)


def in_fp32(plan: Plan, optimizer: str) -> Plan:
    """The plan in float32; with masters where parameters on the host ask for them."""
    plan = in_precision(plan, "fp32", optimizer)
    on_host = any(
        replica.offload.parameters for _, _, stage in plan.stages() for replica in stage.replicas
    )
    if not on_host:
        return plan
    precision = replace(plan.job.precision, master=Dtype.FP32)
    return replace(plan, job=replace(plan.job, precision=precision))


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


def engine_of(
    plan: Plan,
    spec: ModelSpec,
    links: Any,
    *,
    accelerator: Accelerator | None = None,
    clip: float | None = 1.0,
    **words: Any,
) -> Engine:
    """A rank with the weights that every rank and `train_alone` begin with."""
    device = accelerator or open_accelerator("cpu")
    engine = Engine(plan, spec, links.rank, device, links, clip_norm=clip, **words)
    initialize(engine.model, seed=1, deviation=0.1)
    engine.take_masters()
    return engine


def batches_of(
    engine: Engine, step: int, *, packed: bool = False, watcher: RoutingWatcher | None = None
) -> Batches:
    """What a rank computes of a step."""
    plan, spec, seat = engine.plan, engine.spec, engine.seat

    def batches(micro_batch: int) -> Batch:
        first = first_index(plan, seat, micro_batch)
        indices = range(first, first + seat.replica.sequences)
        whole = batch_of(spec, step, indices, plan.job.sequence_length, packed=packed)
        batch = whole.share(spec, seat.replica.cp, seat.place.cp)
        if watcher is not None:
            watcher.expect(batch, step, first)
        return batch

    return batches


def train_rank(
    plan: Plan,
    spec: ModelSpec,
    links: Any,
    steps: int = 3,
    clip: float | None = 1.0,
    *,
    packed: bool = False,
) -> Trained:
    """Train as one rank of a plan; packed documents are not watched by their experts."""
    engine = engine_of(plan, spec, links, clip=clip)
    found = Trained([], [], [], [])
    watcher: RoutingWatcher | None = None
    if not packed:
        units = engine.model.by_number()
        watcher = RoutingWatcher(units, engine.seat.tensor.rank, found.routing)
    record_gradients(engine, found.gradients)
    for step in range(steps):
        batches = batches_of(engine, step, packed=packed, watcher=watcher)
        result = engine.step(batches, settings())
        found.losses.append(result.loss)
        found.norms.append(result.gradient_norm)
    found.weights = engine.weights()
    return found


def record_gradients(engine: Engine, parts: list[Any]) -> None:
    """Keep the gradients of the first step, as the optimizer is about to take them.

    Of tied weights that lie apart the owner's end has the gradient, under the embedding's name.
    """
    clip_norm = engine.handlers[Op.CLIP_NORM]
    ends = tied_ends(engine.spec) if tied_apart(engine.plan) else ()
    owner = next((end for end in ends if end[0] == engine.plan.tied_owner), None)

    def recording(entry: Instruction) -> Any:
        handle = clip_norm(entry)
        if not parts:
            tokens = engine._result.count
            for state in engine.parameters.all_states():
                flat = torch.full((state.span.size,), float("nan"))
                flat[state.kept] = state.final_gradients().cpu().float() / tokens
                pieces = flat.split([block.size for block in state.span.blocks])
                for block, piece in zip(state.span.blocks, pieces, strict=True):
                    end = (block.unit, block.name)
                    if end in ends and end != owner:
                        continue
                    unit, name = ends[0] if end in ends else end
                    slices = tuple(slice(*interval) for interval in block.intervals)
                    parts.append((f"{unit}.{name}", slices, piece.view(block.shape)))
        return handle

    engine.handlers = {**engine.handlers, Op.CLIP_NORM: recording}


def train_threads(
    plan: Plan,
    spec: ModelSpec,
    steps: int = 3,
    clip: float | None = 1.0,
    *,
    packed: bool = False,
) -> Trained:
    """Train with ranks as threads."""

    def one(links: Any) -> Trained:
        return train_rank(plan, spec, links, steps, clip, packed=packed)

    return put_together(spec, World(plan.num_ranks).run(one))


def put_together(spec: ModelSpec, ranks: Sequence[Trained]) -> Trained:
    """Join what all ranks have; those that have the same must agree."""
    assert all(found.losses == ranks[0].losses for found in ranks), "ranks disagree on losses"
    parts = [part for found in ranks for part in found.gradients]
    gradients = whole_tensors(spec, parts, "gradients")
    if spec.ties_weights:  # one end has it all, wherever they lie
        ends = [f"{unit}.{name}" for unit, name in tied_ends(spec)]
        gradients[ends[0]] = sum(gradients[end] for end in ends if end in gradients)
    return Trained(
        ranks[0].losses,
        ranks[0].norms,
        whole_tensors(spec, [part for found in ranks for part in found.weights], "weights"),
        gradients,
        {key: value for found in ranks for key, value in found.routing.items()},
        tuple(group for found in ranks for group in found.groups),
    )


def whole_tensors(spec: ModelSpec, parts: list[Any], what: str) -> dict[str, Tensor]:
    """Put the ranks' parts of tensors together; where they overlap they agree."""
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


def train_alone(
    plan: Plan,
    spec: ModelSpec,
    steps: int = 3,
    clip: float | None = 1.0,
    *,
    packed: bool = False,
) -> Trained:
    """The same in one process, with torch's autograd, in the dtypes of the job."""
    precision = plan.job.precision
    operators = open_accelerator("cpu").operators
    model = Model(spec, operators, dtype=TORCH_DTYPES[precision.stream], narrow=plan.job.narrow)
    initialize(model, seed=1, deviation=0.1)
    parameters = [p for p in model.parameters() if p.requires_grad]
    decays = _decaying(model)
    frozen = [(t, t.view.clone()) for t in model.logical_tensors() if t.piece.parameter.frozen]
    masters = [p.data for p in parameters]
    if precision.master is not None:
        masters = [p.data.to(TORCH_DTYPES[precision.master]) for p in parameters]
    moments = TORCH_DTYPES[precision.moments]
    means, squares = ([torch.zeros_like(p, dtype=moments) for p in parameters] for _ in range(2))
    found = Trained([], [], {}, {})
    units = {0: model.embedding, **dict(enumerate(model.blocks, 1)), spec.head_unit: model.head}
    watcher = None if packed else RoutingWatcher(units, 0, found.routing)
    for step in range(steps):
        loss_sum, tokens = 0.0, 0
        sums = [torch.zeros_like(p, dtype=TORCH_DTYPES[precision.gradients]) for p in parameters]
        for index, batch in separate_batches(plan, spec, step, packed=packed):
            if watcher is not None:
                watcher.expect(batch, step, index)
            output = model(None, batch)
            total = output.loss if output.balance is None else output.loss + output.balance
            total.backward()
            for logical, _ in frozen:  # beside trained ones in one parameter
                if logical.gradient is not None:
                    logical.gradient.zero_()
            loss_sum += float(output.loss.detach())
            tokens += batch.num_tokens
            for own, p in zip(sums, parameters, strict=True):
                own += 0 if p.grad is None else p.grad
                p.grad = None
        norm = sum(float(g.double().square().sum()) for g in sums) ** 0.5 / tokens
        factor = torch.tensor((clip / norm if clip and norm > clip else 1.0) / tokens)
        if step == 0:
            found.gradients = _logical_gradients(model, parameters, sums, tokens)
        for decaying in (True, False):
            own = [i for i, p in enumerate(parameters) if (id(p) in decays) is decaying]
            lists = ([values[i] for i in own] for values in (masters, sums, means, squares))
            _update(plan.job.optimizer, *lists, step + 1, factor, decaying=decaying)
        for p, master in zip(parameters, masters, strict=True):
            p.data.copy_(master)
        for logical, first in frozen:
            logical.view.copy_(first)
        found.losses.append(loss_sum / tokens)
        found.norms.append(norm)
    found.weights = {t.name: t.view for t in model.logical_tensors()}
    return found


def _logical_gradients(
    model: Model, parameters: list[Any], sums: list[Tensor], tokens: int
) -> dict[str, Tensor]:
    """The means of the gradients by logical name."""
    for p, own in zip(parameters, sums, strict=True):
        p.grad = own.to(p.dtype) / tokens
    named = {t.name: t.gradient.clone() for t in model.logical_tensors() if t.gradient is not None}
    for p in parameters:
        p.grad = None
    return named


def _decaying(model: Model) -> set[int]:
    """The stored parameters that decay: matrices and embeddings, no norms and biases."""
    kinds = {f"{u}.{p.name}": p.kind for u in range(model.spec.num_units)
             for p in model.spec.parameters(u)}  # fmt: skip
    return {
        id(logical.owner)
        for logical in model.logical_tensors()
        if kinds[logical.name] in (ParameterKind.LINEAR, ParameterKind.EMBEDDING)
    }


def _update(
    optimizer: str,
    masters: list[Tensor],
    sums: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    number: int,
    factor: Tensor,
    *,
    decaying: bool,
) -> None:
    given = settings() if decaying else replace(settings(), weight_decay=0.0)
    if optimizer == "lion":
        lion(masters, sums, means, settings=given, gradient_factor=factor)
        return
    if optimizer == "adamw":
        adamw(masters, sums, means, squares, step=number, settings=given, gradient_factor=factor)
        return
    for master, own in zip(masters, sums, strict=True):
        master.mul_(1 - given.learning_rate * given.weight_decay)
        master.sub_(given.learning_rate * factor * own)


def assert_same(found: Trained, expected: Trained, optimizer: str) -> dict[Token, float]:
    """Raise unless a training is that of a single process; return tokens at a near-tie.

    A token may go to other experts where its choice hung on rounding; then all that follows may
    differ a little, and only the losses are compared, to a thousandth.
    """
    moved = rerouted(found.routing, expected.routing)
    assert all(margin < NEAR for margin in moved.values()), f"rerouted: {moved}"
    near = pytest.approx(expected.losses, rel=1e-3 if moved else 1e-5)
    assert found.losses == near, f"losses {found.losses}, expected {expected.losses}"
    assert not any(torch.isnan(value).any() for value in found.weights.values())
    assert found.weights.keys() >= expected.weights.keys()
    if not any(step == 0 for step, *_ in moved):
        # under AdamW the second step's gradients already differ by what the first one amplified
        _assert_close(found.gradients, expected.gradients, "gradient of")
        first = pytest.approx(expected.norms[:1], rel=1e-5)
        assert found.norms[:1] == first, f"norm {found.norms[0]}, expected {expected.norms[0]}"
    if optimizer == "sgd" and not moved:
        _assert_close(found.weights, expected.weights, "weights")
    return moved


def _assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    for name, value in expected.items():
        error = float((found[name] - value).norm() / value.norm().clamp_min(1e-9))
        assert error <= 1e-5, f"{what} {name}: {error:.1e} of its norm"
