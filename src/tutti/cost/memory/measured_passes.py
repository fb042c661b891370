"""Memory of a rank whose units were measured: what each pass of a unit took on an accelerator.

A unit's passes are measured one by one (`train.engine.unit_memory`); here they are put in the order
of a rank's list, with what the engine holds besides: parameters, gradients and their sums from the
first weight pass to the optimizer's step, tensors at boundaries, what collectives bring.
A stream belongs to the unit that made it, or to the message that brought it, until that unit's
backward pass; the gradient of a stream to the unit that it enters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tutti.cost.memory.exchange_state import ExchangeState
from tutti.cost.memory.instruction_memory import MemoryFlow, MemoryModel, StaticBytes
from tutti.cost.memory.rank_state import RankState
from tutti.cost.plan.equal_instructions import Kinds
from tutti.models.parameters import ParameterClass
from tutti.plan.plan import covers
from tutti.schedule.boundary import boundary_of, must_join
from tutti.schedule.boundary_rows import wire_rows
from tutti.schedule.instruction import Instruction, Lane, Op, Scope, What


class PassBytes(NamedTuple):
    """Bytes of one pass, above what lay on the chip when it began."""

    peak: float = 0.0
    left: float = 0.0  # when it ended; below 0: it gave back


NOTHING = PassBytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitBytes:
    """The passes of one unit for one micro-batch."""

    forward: PassBytes
    backward_input: PassBytes
    backward_weight: PassBytes  # onto sums of gradients that are there
    collect: PassBytes  # adds to their sums what the weight pass left with the weights
    only_input: PassBytes  # of a step's only micro-batch, which leaves gradients with the weights
    only_weight: PassBytes
    # of the weight pass (of a table the input pass), before it first asks for sums of a class;
    # what these passes say of themselves is what follows
    until_sums: Mapping[ParameterClass, PassBytes] = field(default_factory=dict)
    update: float = 0.0  # by the optimizer, of all weights but those of experts
    expert_update: float = 0.0
    own_gradients: float = 0.0  # that the input pass leaves with the weights, added up from there
    recompute: PassBytes = NOTHING
    offload: PassBytes = NOTHING
    fetch: PassBytes = NOTHING


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBytes:
    """What was measured of a rank."""

    units: Mapping[int, UnitBytes]
    batch: float  # of one micro-batch's tokens
    update: float  # that the optimizer takes besides, per element that it updates


MeasuredRanks = Mapping[tuple[int, int, int], RankBytes]
"""By pipeline, stage and replica group."""


def in_order(passes: Iterable[PassBytes]) -> PassBytes:
    """Return the bytes of passes that follow each other."""
    peak = held = 0.0
    for each in passes:
        peak = max(peak, held + each.peak)
        held += each.left
    return PassBytes(peak, held)


class MeasuredMemory(MemoryModel):
    """The bytes of one class of ranks, their passes as measured."""

    def __init__(self, rank_state: RankState, measured: RankBytes) -> None:
        super().__init__(rank_state)
        self._measured = measured
        self._exchanges = list(rank_state.exchange_states())
        self._tied = rank_state.tied_above(rank_state.model.head_unit)
        for kind, exchange in self._exchanges:
            tied = bool(self._tied) and kind is ParameterClass.DENSE and 0 in exchange.units
            exchange.stays = tied and exchange.level == 3
        self._with_weights: set[int] = set()  # units whose weights have gradients by autograd
        self._received: set[tuple[int, int]] = set()  # streams: unit entered, micro-batch
        self._handed: dict[int, float] = {}  # unit → bytes of gradients that become sums
        self._pieces: dict[tuple[bool, int, What], float] = {}  # bytes, by direction of a boundary
        self._under_way: dict[int, float] = {}  # instruction → bytes that it has until waited for

    def _of(self, unit: int) -> list[ExchangeState]:
        return [exchange for _, exchange in self._exchanges if unit in exchange.units]

    def static(self) -> StaticBytes:
        """Return what lies on the chip from step to step: parameters and optimizer state."""
        counted, size = super().static(), self.precision.parameters.num_bytes
        staying = sum(each.whole for _, each in self._exchanges if each.stays)
        parameters = counted.parameters + staying * size
        return StaticBytes(parameters=parameters, optimizer=counted.optimizer)

    def flow(self, kinds: Kinds) -> MemoryFlow:
        """Return what each instruction takes and gives back, from the first to the last.

        Memory is given and taken as the engine issues its list, in order: what an instruction of
        another lane changes counts with the computation that is issued next.
        """
        self.begin()
        changes = [NOTHING] * len(kinds.listing)
        waiting, last = NOTHING, -1
        for index, entry in enumerate(kinds.listing):
            waiting = in_order([waiting, self.change(entry, index)])
            if entry.lane is Lane.COMPUTE:
                changes[index], waiting, last = waiting, NOTHING, index
        if last >= 0:
            changes[last] = in_order([changes[last], waiting])
        peaks = np.array([each.peak for each in changes], dtype=np.float64)
        left = np.array([each.left for each in changes], dtype=np.float64)
        return MemoryFlow(self.static(), peaks, peaks - left)

    def effect(self, entry: Instruction) -> tuple[float, float]:
        """Return the bytes that an instruction moves; of host copies, whose time they tell."""
        if entry.what is What.ACTIVATIONS and entry.op in (Op.FETCH, Op.OFFLOAD):
            units = (self._measured.units[u] for u in range(entry.start, entry.stop))
            size = sum(-each.offload.left for each in units)
            return (size, 0.0) if entry.op is Op.FETCH else (0.0, size)
        return super().effect(entry)

    # --- instruction by instruction ------------------------------------------------------

    def begin(self) -> None:
        """Begin a step."""
        for _, exchange in self._exchanges:
            exchange.begin()
        self._with_weights.clear()
        self._received.clear()
        self._under_way.clear()

    def change(self, entry: Instruction, index: int) -> PassBytes:
        """Return what the next instruction of the list takes; it is the one of that index."""
        done = sum(self._under_way.pop(earlier, 0.0) for earlier in entry.after)
        taken = self._taken(entry, index)
        if entry.op in (Op.GATHER_PARAMETERS, Op.RECEIVE):  # until somebody waits for it
            self._under_way[index] = self._under_way.get(index, 0.0) + taken.peak - taken.left
            taken = PassBytes(taken.peak, taken.peak)
        return in_order([PassBytes(0.0, -done), taken])

    def _taken(self, entry: Instruction, index: int) -> PassBytes:
        units = range(entry.start, entry.stop)
        match entry.op:
            case Op.FORWARD:
                forward = in_order(self._measured.units[u].forward for u in units)
                return PassBytes(forward.peak, forward.left - self._passed(units, upwards=True))
            case Op.RECOMPUTE:
                return in_order(self._measured.units[u].recompute for u in units)
            case Op.BACKWARD_INPUT:
                return self._input_pass(entry)
            case Op.BACKWARD_WEIGHT:
                return self._weight_pass_of(units)
            case Op.SEND:
                # a stream stays with the unit that made it; a gradient leaves
                sent = self.boundary() if entry.what is What.GRADIENTS else 0.0
                return PassBytes(self._in_pieces(entry, sends=True), -sent)
            case Op.RECEIVE:
                return self._receive(entry)
            case Op.CLIP_NORM:  # the step's tokens are forgotten
                return PassBytes(0.0, -self.num_micro_batches * self._measured.batch)
            case Op.STEP:
                return self._step(units)
            case Op.GATHER_PARAMETERS | Op.REDUCE_GRADIENTS:
                return self._collective(entry, index)
            case Op.SYNC_TIED:
                return self._tied_ends(entry, index)
            case Op.FETCH | Op.OFFLOAD:
                return self._host_copy(entry)
        return NOTHING

    def _passed(self, units: range, *, upwards: bool) -> float:
        """Return the bytes of parameters that are let go with the end of a pass."""
        gone = sum(each.passed(units, upwards=upwards) for _, each in self._exchanges)
        return gone * self.precision.parameters.num_bytes

    def _input_pass(self, entry: Instruction) -> PassBytes:
        units = range(entry.start, entry.stop)
        passes: list[PassBytes] = []
        for unit in reversed(units):
            measured = self._measured.units[unit]
            if not self._adds_up:
                passes.append(measured.only_input)
                if unit == 0:  # a tied head's gradient is there to be added to
                    tied = self._tied * self.precision.parameters.num_bytes
                    passes.append(PassBytes(0.0, -tied))
                continue
            if unit == 0:  # a table's gradient is added at once
                passes += self._until_sums(0)
            if unit in self._with_weights:  # those of an earlier micro-batch are added to
                passes.append(PassBytes(0.0, -measured.own_gradients))
            passes.append(measured.backward_input)
            self._with_weights.add(unit)
        passes_bytes = in_order(passes)
        given = self._passed(units, upwards=False)
        if (entry.start, entry.micro_batch) in self._received:
            self._received.remove((entry.start, entry.micro_batch))
            given += self.boundary()
        return PassBytes(passes_bytes.peak, passes_bytes.left - given)

    @property
    def _adds_up(self) -> bool:
        """Whether the gradients of several micro-batches add up."""
        return self.num_micro_batches > 1

    def _weight_pass_of(self, units: range) -> PassBytes:
        if self._adds_up:
            weighed = [self._added_weights(unit) for unit in reversed(units)]
            return in_order([*weighed, *(self._collected(unit) for unit in units)])
        # loose gradients stay as they are made; then all others are copied into vectors
        passes = [self._measured.units[unit].only_weight for unit in reversed(units)]
        copied = 0
        for unit in units:
            for exchange in self._of(unit):
                exchange.made.add(unit)
                copied += exchange.flat.get(unit, 0)
        passes += [self._new_sums(unit) for unit in units]
        passes.append(PassBytes(0.0, -copied * self.precision.parameters.num_bytes))
        return in_order(passes)

    def _added_weights(self, unit: int) -> PassBytes:
        """Return the weight pass of a unit, onto its sums."""
        # the first gradients that stay loose are their sums themselves, where they were left
        loose = sum(e.loose.get(unit, 0) for e in self._of(unit) if unit not in e.made)
        left = -self._measured.units[unit].collect.left
        self._handed[unit] = min(left, loose * self.precision.gradients.num_bytes)
        passes = [PassBytes(0.0, -self._handed[unit])]
        if unit:
            passes += self._until_sums(unit)
        return in_order([*passes, self._measured.units[unit].backward_weight, self._new_sums(unit)])

    def _until_sums(self, unit: int) -> list[PassBytes]:
        """A pass until it has all the sums that it asks for, which come class by class."""
        asked = self._measured.units[unit].until_sums
        passes: list[PassBytes] = []
        for kind, until in asked.items():
            own = any(k is kind and unit in e.units for k, e in self._exchanges)
            passes += [until, self._new_sums(unit, kind if own else ParameterClass.DENSE)]
        return passes

    def _collected(self, unit: int) -> PassBytes:
        """Let go of the gradients that a weight pass left with the weights."""
        measured = self._measured.units[unit]
        passes = [measured.collect, PassBytes(0.0, self._handed.pop(unit))]
        if unit not in self._with_weights:  # an earlier weight pass took them along
            passes.append(PassBytes(0.0, measured.own_gradients))
        elif self._tied and unit in (0, self.rank_state.model.head_unit):
            tied = self._tied * self.precision.parameters.num_bytes
            # a tied table's are taken over with the embedding's
            passes.append(PassBytes(0.0, tied if unit else -tied))
        self._with_weights.discard(unit)
        return in_order(passes)

    def _new_sums(self, unit: int, only: ParameterClass | None = None) -> PassBytes:
        """Take memory for the sums of a unit's gradients, where they have none."""
        kinds = (
            self._exchanges if only is None else [own for own in self._exchanges if own[0] is only]
        )
        more = sum(exchange.add(unit) for _, exchange in kinds if unit in exchange.units)
        size = more * self.precision.gradients.num_bytes
        return PassBytes(size, size)

    # --- messages ------------------------------------------------------------------------

    def _receive(self, entry: Instruction) -> PassBytes:
        """A tensor-parallel group takes slices from the wire and joins them."""
        size, work = self.boundary(), self.rank_state.workload
        taken = size + self._in_pieces(entry, sends=False)
        if must_join(self.rank_state.replica):
            taken += size / work.tp
        if entry.what is What.ACTIVATIONS:
            self._received.add((entry.start, entry.micro_batch))
        return PassBytes(taken, size)

    def _in_pieces(self, entry: Instruction, *, sends: bool) -> float:
        """Return the bytes that cross a boundary in memory of their own."""
        key = (sends, entry.start, entry.what)
        if key not in self._pieces:
            state = self.rank_state
            wire = boundary_of(self.plan, state.place[0], entry.start, entry.what)
            rows = wire_rows(wire, state.stage_rank, sends=sends)
            apart = sum(len(each) for each in rows.places if not isinstance(each, slice))
            self._pieces[key] = apart * state.model.hidden * state.workload.element_bytes
        return self._pieces[key]

    def _collective(self, entry: Instruction, index: int) -> PassBytes:
        kind = ParameterClass(entry.what.value)
        exchange = next(e for k, e in self._exchanges if k is kind and e.units[0] == entry.start)
        if entry.op is Op.GATHER_PARAMETERS:
            size = self.precision.parameters.num_bytes
            self._under_way[index] = exchange.leave() * size
            brought = exchange.bring() if exchange.level == 3 else 0
            return PassBytes((exchange.joint + brought) * size, brought * size)
        if entry.scope is Scope.ALL and exchange.level >= 2:  # joins what pipelines reduced
            done = sum(self._under_way.pop(earlier, 0.0) for earlier in exchange.reductions)
            joined = exchange.crossing * self.precision.gradients.num_bytes
            self._under_way[index] = joined
            return in_order([PassBytes(0.0, -done), PassBytes(joined, joined)])
        taken, given, added = exchange.reduce()
        size = self.precision.gradients.num_bytes
        exchange.reductions.append(index)
        self._under_way[index] = added * size
        return PassBytes(taken * size, (taken - given) * size)

    def _tied_ends(self, entry: Instruction, index: int) -> PassBytes:
        """Tied weights whose ends lie apart: what is sent is copied, what comes waits."""
        precision, owner = self.plan.job.precision, self.plan.tied_owner
        upwards = entry.what is What.GRADIENTS
        size = (precision.gradients if upwards else precision.parameters).num_bytes
        ends = [(u, count) for _, e in self._exchanges for u, count in e.tied.items()]
        taken = size * sum(count for _, count in ends)
        comes = size * sum(count for unit, count in ends if (unit == owner) is upwards)
        self._under_way[index] = comes
        return PassBytes(taken, comes)

    # --- state ---------------------------------------------------------------------------

    def _step(self, units: range) -> PassBytes:
        size, decoded = self.precision.gradients.num_bytes, self.decoded(units)
        passes: list[PassBytes] = []
        for kind, exchange in self._exchanges:
            if not any(unit in exchange.units for unit in units):
                continue
            taken = self._updated(kind, exchange) + decoded
            passes.append(PassBytes(taken, -exchange.forget() * size))
            if covers(self.offload.parameters, exchange.units[0]):  # as they go to the host
                home = exchange.kept * self.precision.parameters.num_bytes
                passes.append(PassBytes(home, home))
        return in_order(passes)

    def _updated(self, kind: ParameterClass, exchange: ExchangeState) -> float:
        """What an update takes: tensor by tensor, or of this rank's part of one vector."""
        if exchange.level or not exchange.updated:
            return exchange.updated * self._measured.update
        units = [self._measured.units[unit] for unit in exchange.units]
        if kind is ParameterClass.EXPERT:
            return sum(unit.expert_update for unit in units)
        apart = {u for k, e in self._exchanges if k is ParameterClass.EXPERT for u in e.units}
        together = (self._measured.units[unit] for unit in exchange.units if unit not in apart)
        return sum(unit.update for unit in units) + sum(unit.expert_update for unit in together)

    def _forgotten(self, units: range) -> float:
        """Let gradients go; return their bytes."""
        exchanges = {id(e): e for unit in units for e in self._of(unit)}
        count = sum(exchange.forget() for exchange in exchanges.values())
        return count * self.precision.gradients.num_bytes

    def _host_copy(self, entry: Instruction) -> PassBytes:
        units = range(entry.start, entry.stop)
        if entry.what is What.BATCH:
            return PassBytes(self._measured.batch, self._measured.batch)
        if entry.what is What.ACTIVATIONS:
            fetched = entry.op is Op.FETCH
            each = (self._measured.units[u] for u in units)
            return in_order(unit.fetch if fetched else unit.offload for unit in each)
        if entry.what is What.GRADIENTS and entry.op is Op.OFFLOAD:
            return PassBytes(0.0, -self._forgotten(units))
        if entry.what is What.PARAMETERS and entry.op is Op.FETCH:
            return self._fetched_parameters(units)
        if entry.what is What.PARAMETERS:
            exchanges = {id(e): e for unit in units for e in self._of(unit)}.values()
            gone = sum(exchange.kept for exchange in exchanges)
            return PassBytes(0.0, -gone * self.precision.parameters.num_bytes)
        taken, given = self.effect(entry)
        return PassBytes(taken, taken - given)

    def _fetched_parameters(self, units: range) -> PassBytes:
        exchanges = {id(e): e for unit in units for e in self._of(unit)}.values()
        brought = sum(e.bring() if e.level < 3 else e.fetch() for e in exchanges)
        size = self.precision.parameters.num_bytes
        return PassBytes(brought * size, brought * size)
