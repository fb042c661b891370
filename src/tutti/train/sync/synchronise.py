"""Gradients out, parameters in: what the holders of a bucket do together.

Level 0 sums gradients everywhere; 1 leaves each holder the sum of its shard; 2 and 3 do so inside
the pipeline after every micro-batch, and join the pipelines' shards at the end of the step. Level 3
also keeps parameters only while they are used.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from tutti.accelerator.accelerator import Accelerator
from tutti.hardware.chip import Dtype
from tutti.models.parameters import ParameterClass
from tutti.nn.storage import Logical
from tutti.ownership.buckets import Bucket
from tutti.plan.job import Job
from tutti.plan.plan import covers
from tutti.ranks.links import Handle, Links, Then
from tutti.ranks.rank_places import Seat, Seats
from tutti.schedule.instruction import Instruction, Scope, What
from tutti.train.state.span_gradients import Away
from tutti.train.state.state import SpanState
from tutti.train.sync.cross_pipeline_sums import Joint, joints
from tutti.train.sync.narrow_gather import NarrowGather

NORM_ELEMENTS = 1 << 24  # squared at a time

_CLASS = {What.DENSE: ParameterClass.DENSE, What.EXPERT: ParameterClass.EXPERT}


class Exchange:
    """The parameters of one class of one bucket's span of units, on this rank."""

    def __init__(
        self,
        states: Sequence[SpanState],
        level: int,
        joints: Sequence[Joint] = (),
    ) -> None:
        self.states, self.level = list(states), level
        self.joints = list(joints)
        # parameters are in the modules only for the time of a pass
        self.comes_and_goes = level == 3 or any(state.home for state in self.states)
        self.under_way: list[Handle] = []  # reductions of earlier micro-batches
        self.stays = False  # parameters that another unit uses, too, are never let go
        self.uses = 0  # passes that parameters were brought for and that are not over

    def owners(self) -> list[nn.Parameter]:
        """Return the stored parameters of these spans."""
        owners = {id(o): o for state in self.states for o in state.owners}
        return list(owners.values())

    @property
    def units(self) -> list[int]:
        """The units whose parameters these are, rising."""
        return sorted({block.unit for state in self.states for block in state.span.blocks})


class Synchronised:
    """All parameters of a rank, by the units that travel together."""

    def __init__(
        self,
        seats: Seats,
        seat: Seat,
        buckets: Sequence[Bucket],
        tensors: Mapping[tuple[int, str], Logical],
        job: Job,
        links: Links,
        accelerator: Accelerator,
        *,
        narrow: Iterable[Tensor] = (),
    ) -> None:
        """Make the state of a rank; `narrow` are the weights that it multiplies in 8 bits."""
        self._narrow = {id(weight) for weight in narrow}
        self._gathers: dict[int, NarrowGather | None] = {}  # by id of state
        self._seats, self._seat, self._links, self._job = seats, seat, links, job
        self._accelerator = accelerator
        self._tensors = tensors
        # parameters with frozen parts, which no gather would bring back, are never let go
        self._lasting = {id(t.owner) for t in tensors.values() if not t.piece.parameter.trainable}
        self.exchanges: dict[tuple[int, ParameterClass], Exchange] = {}
        self._of_unit: dict[int, list[Exchange]] = {unit: [] for unit in seat.units}
        for bucket in buckets:
            if bucket.start not in self._of_unit:
                continue
            for kind in ParameterClass:
                if bucket.rule(kind) is None:
                    continue
                key = (bucket.span(kind)[0], kind)
                if key not in self.exchanges:
                    self.exchanges[key] = self._make(bucket, kind)
                    for unit in range(*bucket.span(kind)):
                        self._of_unit[unit].append(self.exchanges[key])

    def _make(self, bucket: Bucket, kind: ParameterClass) -> Exchange:
        shared = bucket.reduce_dense if kind is ParameterClass.DENSE else bucket.reduce_expert
        ownership, level = self._seats.ownership, bucket.level(kind)
        rank, offload = self._seat.rank, self._seat.replica.offload
        away = Away(
            optimizer=covers(offload.optimizer, bucket.start),
            parameters=covers(offload.parameters, bucket.start),
            gradients=covers(offload.gradients, bucket.start),
        )
        spans = ownership.kept_spans(bucket, kind, self._seat.place.pipeline)
        states = [
            SpanState(
                span,
                rank,
                level,
                self._tensors,
                self._job.precision,
                self._job.optimizer,
                self._accelerator,
                away,
                shared=shared,
                average=self._job.average,
            )
            for span in spans
            if span.is_held_by(rank)
        ]
        crossing: Sequence[Joint] = ()
        if level >= 2 and bucket.several_pipelines:
            crossing = joints(ownership.by_pipeline(bucket, kind), rank, states)
        return Exchange(states, level, crossing)

    # --- looking up ------------------------------------------------------------------------

    def of_units(self, units: Iterable[int]) -> list[Exchange]:
        """Return the exchanges that concern some units, each once."""
        exchanges = {id(e): e for unit in units for e in self._of_unit[unit]}
        return list(exchanges.values())

    def all_states(self) -> list[SpanState]:
        """Return every span of this rank, by rising unit."""
        return [state for _, exchange in sorted(self.exchanges.items(), key=lambda i: i[0])
                for state in exchange.states]  # fmt: skip

    def _meant(self, entry: Instruction) -> Exchange:
        return self.exchanges[entry.start, _CLASS[entry.what]]

    def holders(self, entry: Instruction) -> set[int]:
        """Return the ranks that this one meets in a collective of parameters or gradients."""
        return {rank for state in self._meant(entry).states for rank in state.span.holders}

    # --- gradients -------------------------------------------------------------------------

    def collect(self, start: int, stop: int, lent: Container[int] = ()) -> None:
        """Move what a weight pass left in the modules into the flat gradients.

        The gradients of `lent` units will be overwritten: what is kept of them is a copy.
        """
        for exchange in self.of_units(range(start, stop)):
            for state in exchange.states:
                state.add_gradients(range(start, stop), lent)
        for (unit, _), logical in self._tensors.items():
            if start <= unit < stop:
                logical.owner.grad = None

    def reduce(self, entry: Instruction) -> Handle:
        """Run a ReduceGradients instruction."""
        exchange = self._meant(entry)
        if exchange.level >= 2 and entry.scope is Scope.ALL:
            for earlier in exchange.under_way:  # a lane's work is done in order
                earlier.wait()
            exchange.under_way.clear()
            return Then([joint.all_reduce(self._links) for joint in exchange.joints])
        handle = Then([self._reduce_span(state) for state in exchange.states])
        exchange.under_way.append(handle)
        return handle

    def _reduce_span(self, state: SpanState) -> Handle:
        if state.loose is not None:
            return Then(())
        span, gradient = state.span, state.taken_gradient()
        if len(span.members) == 1:
            state.add_total(gradient)
            return Then(())
        if state.level == 0:
            handle = self._links.all_reduce(span.holders, gradient)
            return Then([handle], lambda: state.add_total(gradient))
        out = gradient.new_empty(state.num_kept)
        handle = self._links.reduce_scatter(span.holders, gradient, span.counts, out)
        return Then([handle], lambda: state.add_total(out))

    def close(self) -> None:
        """Take over gradients that nobody shares; what is shared was reduced by now."""
        for state in self.all_states():
            state.close()

    def end_step(self) -> None:
        """Forget what a step had under way."""
        for exchange in self.exchanges.values():
            exchange.under_way.clear()

    # --- parameters ------------------------------------------------------------------------

    def gather(self, entry: Instruction) -> Handle:
        """Run a GatherParameters instruction: bring all shards together in the modules."""
        exchange = self._meant(entry)
        if exchange.level == 3:
            exchange.uses += 1
            for owner in exchange.owners():
                allocate(owner, self._accelerator)
        return Then([self._gather_span(state) for state in exchange.states])

    def _gather_span(self, state: SpanState) -> Handle:
        span, shard = state.span, state.shard()
        alone = len(span.members) == 1
        narrow = None if alone or state.level < 3 else self._narrow_gather(state)
        message, counts = shard, span.counts
        if narrow is not None:
            message, counts = narrow.write(span.holders.index(state.rank), shard), narrow.counts
        came = message if alone else message.new_empty(sum(counts))

        def place() -> None:
            whole = came
            if narrow is not None:
                whole = shard.new_empty(span.size)
                narrow.read(came, whole)
            state.put_parameters(whole)
            if state.home is not None:
                state.home.leave()

        if alone:
            return Then((), place)
        return Then([self._links.all_gather(span.holders, message, counts, came)], place)

    def _narrow_gather(self, state: SpanState) -> NarrowGather | None:
        """Return how parameters come in 8 bits; None: none of them do.

        Holders may slice weights differently, or be unlike chips: what comes so is what all of them
        multiply so. They tell each other once.
        """
        if self._job.precision.compute is not Dtype.FP8:
            return None
        if id(state) not in self._gathers:
            holders, blocks = state.span.holders, state.span.blocks
            own = [float(id(owner) in self._narrow) for owner in state.owners]
            flags = torch.tensor(own, device=self._accelerator.device)
            self._links.all_reduce(holders, flags, use="parameters").wait()
            narrow = [flag == len(holders) for flag in flags.tolist()]
            made = NarrowGather(blocks, narrow, state.span.bounds) if any(narrow) else None
            self._gathers[id(state)] = made
        return self._gathers[id(state)]

    def passed(self, units: range, *, upwards: bool) -> None:
        """Let go of parameters whose pass is over and that are brought anew for each."""
        for exchange in self.of_units(units):
            if not exchange.comes_and_goes or not exchange.states:
                continue
            own = exchange.units
            if (own[-1] if upwards else own[0]) not in units:
                continue
            exchange.uses -= 1
            if exchange.uses == 0 and not exchange.stays:
                self.release(exchange)

    def release(self, exchange: Exchange) -> None:
        """Let go of the memory of parameters."""
        for owner in exchange.owners():
            if id(owner) not in self._lasting:
                self._accelerator.resize(owner.untyped_storage(), 0)


def allocate(owner: nn.Parameter, accelerator: Accelerator) -> None:
    """Give a released parameter its memory back."""
    storage = owner.untyped_storage()
    needed = owner.numel() * owner.element_size()
    if storage.size() != needed:
        accelerator.resize(storage, needed)


def squared_norm(states: Iterable[SpanState], pipeline: int, accelerator: Accelerator) -> Tensor:
    """Return the sum of squares of the gradients that this rank alone counts.

    At levels 2 and 3 every pipeline keeps all elements; the first one counts.
    """
    total = torch.zeros((), dtype=torch.float32, device=accelerator.device)
    here: list[Tensor] = []
    for state in states:
        if state.level >= 2 and pipeline != 0:
            continue
        for _, gradient in state.gradient_parts(counted=True):
            if gradient.device == accelerator.device and accelerator.device.type != "cpu":
                here.append(gradient)
                continue
            for part in gradient.reshape(-1).split(NORM_ELEMENTS):
                total += part.float().square().sum().to(accelerator.device)
    return total + accelerator.operators.squared_norm(here) if here else total
