"""Measures what the passes of a rank's units take on an accelerator, unit by unit, without others.

Each kind of unit is built alone, with groups whose other ranks are stand-ins, and goes through its
passes once with the allocator watched. Experts are chosen in turn, as a balanced router would. The
cost model puts the figures together under the plan's schedule (`cost.memory.measured_passes`).
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tutti.accelerator.accelerator import Accelerator
from tutti.accelerator.reference.experts import Routing
from tutti.accelerator.reference.optimizer import AdamSettings
from tutti.cost.kernels import Kernels
from tutti.cost.memory.measured_passes import (
    MeasuredRanks,
    PassBytes,
    RankBytes,
    UnitBytes,
    in_order,
)
from tutti.cost.memory.rank_state import HolderIndex, RankState
from tutti.hardware.chip import Dtype
from tutti.models.parameters import ParameterClass
from tutti.models.spec import ModelSpec
from tutti.nn.batch import Batch
from tutti.nn.initialize import initialize
from tutti.nn.model import Model
from tutti.nn.parallel.groups import shares
from tutti.nn.parallel.stand_in import StandInGroup
from tutti.nn.storage import Logical
from tutti.ownership.buckets import make_buckets
from tutti.ownership.elements import RankElements
from tutti.ownership.ownership import Span
from tutti.plan.plan import Plan, covers
from tutti.ranks.links import Use
from tutti.ranks.rank_places import Seat, Seats
from tutti.ranks.single_rank import NoLinks
from tutti.schedule.schedule import build_schedule
from tutti.train.engine.model_groups import EngineContext
from tutti.train.engine.passes import Passes
from tutti.train.engine.recompute import SelectiveOperators
from tutti.train.graphs.captured_blocks import NoGraphs
from tutti.train.state.state import TORCH_DTYPES, compute_dtype

EVERYTHING = 1 << 60  # a limit that nothing reaches: devices without a count of their own count
SAMPLE_ELEMENTS = 1 << 16  # that the optimizer updates, to see what it takes


class _StandInLinks(NoLinks):
    """Links of one rank among stand-ins."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def group(self, ranks: Sequence[int], *, use: Use = "block") -> Any:
        """Return a group of the right size."""
        del use
        return StandInGroup(len(ranks), list(ranks).index(self._rank))


class BalancedOperators(SelectiveOperators):
    """Operators whose router gives every expert as many tokens."""

    def route(self, logits: Tensor, *others: Any) -> Routing:
        """Return the routing with the experts in turn."""
        routing = self._operators.route(logits, *others)
        count, top = routing.experts.shape
        turns = torch.arange(count * top, device=logits.device) % logits.shape[1]
        return routing._replace(experts=turns.view(count, top).to(routing.experts.dtype))


def measure_ranks(plan: Plan, spec: ModelSpec, accelerator: Accelerator) -> MeasuredRanks:
    """Return what passes take on the fullest rank of every class of a plan."""
    seats, fullest = Seats(plan, spec), {}
    index, elements = HolderIndex(plan), RankElements(plan, spec)
    for rank_class in build_schedule(plan).classes:
        place = (rank_class.pipeline, rank_class.stage, rank_class.replica)
        state = RankState(plan, spec, place, Kernels(), index, elements)
        fullest[place] = seats[seats.map.first_rank(*place[:2]) + state.stage_rank]
    counted = accelerator.counts_memory
    if not counted:
        accelerator.limit_memory(EVERYTHING)
    try:
        with _only_new_garbage():
            return {
                place: RankMeter(seats, own, accelerator).rank() for place, own in fullest.items()
            }
    finally:
        if not counted:
            accelerator.limit_memory(None)


@contextmanager
def _only_new_garbage() -> Iterator[None]:
    """Let collections look at what is made from here on: all of a large process takes seconds."""
    if gc.get_freeze_count():  # somebody else keeps what is old out of them
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class RankMeter:
    """Measures the units of one rank."""

    def __init__(self, seats: Seats, seat: Seat, accelerator: Accelerator) -> None:
        plan, self._spec, self._seats, self._seat = seats.plan, seats.spec, seats, seat
        self._plan = plan
        self._buckets = {
            unit: bucket
            for bucket in make_buckets(plan)
            for unit in range(bucket.start, bucket.stop)
        }
        self._accelerator = accelerator
        self._dtype = compute_dtype(plan.job.precision)
        self._operators = BalancedOperators(accelerator.operators)
        self._before = 0  # bytes when the part of a pass that is watched began
        # by class of weights, what the pass took until it first asked for a sum of theirs
        self._asked: dict[ParameterClass, PassBytes] = {}
        self._context = EngineContext(seat, _StandInLinks(seat.rank))

    def rank(self) -> RankBytes:
        """Return the figures of the rank."""
        batch, size = self._batch()
        flat = self._sharded_update()
        known: dict[object, UnitBytes] = {}
        units = {}
        replica = self._seat.replica
        for unit in self._seat.units:
            again = replica.recompute
            kind = (
                self._spec.unit_kinds[unit],
                covers(again.full, unit),
                covers(again.selective, unit),
                covers(replica.offload.activations, unit),
                self._plan.job.narrow(unit),
            )
            if kind not in known:
                known[kind] = self._unit(unit, batch)
            units[unit] = known[kind]
        return RankBytes(units=units, batch=size, update=flat / SAMPLE_ELEMENTS)

    def _watched(self, work: Callable[[], object]) -> PassBytes:
        """Run something; return what it took, since it last asked for new sums."""
        self._asked = {}
        self._accelerator.reset_peak()
        self._before = self._accelerator.memory().allocated
        work()
        return self._so_far()

    def _so_far(self) -> PassBytes:
        now = self._accelerator.memory()
        return PassBytes(now.peak - self._before, now.allocated - self._before)

    def _ask(
        self, sums: Mapping[int, Tensor], experts: Container[int], weight: Tensor
    ) -> Tensor | None:
        """Return a weight's sum; note what its pass took until it first asked for one."""
        kind = ParameterClass.EXPERT if id(weight) in experts else ParameterClass.DENSE
        if kind not in self._asked:
            self._asked[kind] = self._so_far()
            self._accelerator.reset_peak()
            self._before = self._accelerator.memory().allocated
        return sums.get(id(weight))

    def _batch(self) -> tuple[Batch, float]:
        sequences, length = self._seat.replica.sequences, self._plan.job.sequence_length
        batches: list[Batch] = []

        def make() -> None:
            tokens = torch.zeros(sequences * length, dtype=torch.long)
            there = self._accelerator.to_device(tokens)
            whole = Batch.of(
                self._spec,
                there,
                [length] * sequences,
                targets_t=self._accelerator.to_device(tokens + 1),
                row_length=length,
            )
            batches.append(whole.share(self._spec, self._seat.replica.cp, self._seat.place.cp))

        size = self._watched(make).left
        return batches[0], size

    def _unit(self, unit: int, batch: Batch) -> UnitBytes:
        """Return the figures of a unit: one micro-batch with sums of gradients, one without."""
        model = Model(
            self._spec,
            self._operators,  # type: ignore[arg-type]  # the same methods
            units=(unit,),
            parallel=self._context,
            dtype=self._dtype,
            device=self._accelerator.device,
            tied=False,
            context_kind=self._seat.replica.context_kind,
            narrow=self._plan.job.narrow,
        )
        initialize(model, on_device=True)
        owners = [p for p in model.parameters() if p.requires_grad]
        wide = TORCH_DTYPES[self._plan.job.precision.gradients]
        sums = {id(p): torch.zeros_like(p, dtype=wide, requires_grad=False) for p in owners}

        def collect() -> None:
            for parameter in owners:
                if parameter.grad is not None:
                    sums[id(parameter)].add_(parameter.grad)
            for parameter in owners:
                parameter.grad = None

        one_by_one = {id(logical.owner) for logical in self._scattered(model, unit)}
        straight = {key: total for key, total in sums.items() if key not in one_by_one}
        tensors = list(model.logical_tensors())
        of_experts = {id(t.owner) for t in tensors if t.piece.parameter.experts}

        measured: dict[str, Any] = {}
        for several in (True, False):
            given = straight if several else {}
            passes = Passes(
                model.by_number(),
                self._seat.replica,
                self._accelerator,
                self._operators,
                NoGraphs(),
                functools.partial(self._ask, given, of_experts),
            )
            passes.begin_step(1.0)
            measured |= self._passes(passes, unit, batch, collect if several else None)
            left = {t.name: t.gradient for t in tensors}
            for parameter in owners:
                parameter.grad = None
        loose = self._loose(unit)
        once = self._plan.pipelines[self._seat.place.pipeline].micro_batches == 1
        updates = []
        for experts in (False, True):
            chosen = [t for t in tensors if (id(t.owner) in of_experts) is experts]
            chosen = [t for t in chosen if t.view.dim() > 1]
            gradients = [
                (left[t.name] if once else t.piece.seen(sums[id(t.owner)]))
                if t.name in loose
                else None
                for t in chosen
            ]
            updates.append(self._update([t.view for t in chosen], gradients))
        return UnitBytes(**measured, update=updates[0], expert_update=updates[1])

    def _passes(
        self, passes: Passes, unit: int, batch: Batch, collect: Callable[[], None] | None
    ) -> dict[str, Any]:
        """Run a micro-batch; without `collect` only its weight pass is told."""
        rows, spec = self._rows(batch), self._spec
        stream = torch.randn(rows, spec.hidden, dtype=self._dtype, device=self._accelerator.device)
        if unit:
            passes.streams[unit, 0] = stream
        measured: dict[str, Any] = {}
        measured["forward"] = self._watched(lambda: passes.forward(unit, unit + 1, 0, batch))
        passes.streams.pop((unit + 1, 0), None)
        gc.collect()
        where = range(unit, unit + 1)
        if covers(self._seat.replica.offload.activations, unit):
            measured["offload"] = self._watched(lambda: passes.offload_activations(where, 0))
            measured["fetch"] = self._watched(lambda: passes.fetch_activations(where, 0))
        again = bool(passes.live[unit, 0].again)
        if again:
            measured["recompute"] = self._watched(lambda: passes.recompute(unit, unit + 1, 0))
        if unit != spec.head_unit:
            passes.gradients[unit + 1, 0] = torch.randn_like(stream)
        into = self._watched(lambda: passes.backward_input(unit, unit + 1, 0))
        measured["backward_input"], measured["until_sums"] = into, self._asked
        only_input = in_order([*self._asked.values(), into])
        gradient = passes.gradients.pop((unit, 0), None)
        made = [p.grad for p in passes.units[unit].parameters() if p.grad is not None]
        measured["own_gradients"] = float(sum(g.numel() * g.element_size() for g in made))
        del made

        weighed = self._watched(lambda: passes.backward_weight(unit, unit + 1, 0))
        del gradient
        if collect is None:
            only_weight = in_order([*self._asked.values(), weighed])
            return {"only_input": only_input, "only_weight": only_weight}
        measured["until_sums"] |= self._asked
        return measured | {"backward_weight": weighed, "collect": self._watched(collect)}

    def _held(self, unit: int) -> Iterator[tuple[Span, str]]:
        """Yield the tensors of a unit that this rank holds, with the spans they lie in."""
        bucket, ownership = self._buckets[unit], self._seats.ownership
        for kind in ParameterClass:
            if bucket.rule(kind) is not None:
                held = ownership.kept_spans(bucket, kind, self._seat.place.pipeline)
                for span in (span for span in held if span.is_held_by(self._seat.rank)):
                    for block in (block for block in span.blocks if block.unit == unit):
                        yield span, f"{unit}.{block.name}"

    def _loose(self, unit: int) -> set[str]:
        """Return the tensors whose gradients the optimizer gets as the passes made them."""
        if any(self._buckets[unit].level(kind) for kind in ParameterClass):
            return set()
        return {name for span, name in self._held(unit) if len(span.members) == 1}

    def _scattered(self, model: Model, unit: int) -> Iterator[Logical]:
        """Yield the tensors of parameters whose sum does not lie in one place: see `Sums`."""
        spans: dict[str, set[int]] = {}
        for span, name in self._held(unit):
            spans.setdefault(name, set()).add(id(span))
        by_owner: dict[int, list[Logical]] = {}
        for logical in model.logical_tensors():
            by_owner.setdefault(id(logical.owner), []).append(logical)
        for tensors in by_owner.values():
            places = set().union(*(spans.get(logical.name, set()) for logical in tensors))
            stacked = len(tensors) == 1 or all(logical.piece.dim == 0 for logical in tensors)
            if len(places) != 1 or not stacked:
                yield from tensors

    def _rows(self, batch: Batch) -> int:
        """Return how many tokens of the stream are this rank's."""
        if not self._seat.sequence_parallel:
            return batch.num_tokens
        return shares(batch.num_tokens, self._seat.tensor.size)[self._seat.tensor.rank]

    def _sharded_update(self) -> float:
        """Return the bytes that an update takes of a vector of so many elements."""
        precision = self._plan.job.precision
        kind = TORCH_DTYPES[precision.master or precision.parameters]
        device = self._accelerator.device
        vector = torch.zeros(SAMPLE_ELEMENTS, dtype=kind, device=device)
        return self._update([vector], follows=False)

    def _update(
        self, views: Sequence[Tensor], loose: Sequence[Tensor | None] = (), *, follows: bool = True
    ) -> float:
        """Return the bytes that an update of tensors takes besides their state.

        What is moved lies as in the modules, and so do gradients that are `loose`; means, masters
        and sums that are shared lie by themselves. What is moved `follows` its masters, if there
        are any.
        """
        precision, device = self._plan.job.precision, self._accelerator.device

        def zeros(dtype: Dtype) -> list[Tensor]:
            kind = TORCH_DTYPES[dtype]
            return [torch.zeros(view.shape, dtype=kind, device=device) for view in views]

        of_modules = [view.detach() for view in views]
        weights, copies = of_modules, None
        if follows and precision.master is not None:
            weights, copies = zeros(precision.master), of_modules
        gradients, means, squares = (
            zeros(dtype) for dtype in (precision.gradients, precision.moments, precision.moments)
        )
        for index, gradient in enumerate(loose):
            if gradient is not None:
                gradients[index] = gradient
        factor = torch.ones((), device=device)
        took = self._watched(
            lambda: self._accelerator.operators.adamw(
                weights, gradients, means, squares, step=1, copies=copies,
                settings=AdamSettings(learning_rate=1e-3), gradient_factor=factor,
            )
        )  # fmt: skip
        return took.peak
