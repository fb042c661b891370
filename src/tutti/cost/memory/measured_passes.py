"""Memory of a rank whose units were measured: what each pass of a unit took on an accelerator.

A unit's passes are measured one by one (`train.engine.unit_memory`); here they are put in the order
of a rank's list, with what the engine holds besides: parameters, gradients and their sums from the
first weight pass to the optimizer's step, tensors at boundaries, what collectives bring.
A stream belongs to the unit that made it, or to the message that brought it, until that unit's
backward pass; the gradient of a stream to the unit that it enters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tutti.cost.memory.instruction_memory import MemoryFlow, MemoryModel, StaticBytes
from tutti.cost.memory.rank_state import Holdings
from tutti.cost.plan.equal_instructions import Kinds
from tutti.models.parameters import ParameterClass
from tutti.plan.plan import covers
from tutti.schedule.instruction import Instruction, Lane, Op, What


class PassBytes(NamedTuple):
    """Bytes of one pass, above what lay on the chip when it began."""

    peak: float = 0.0
    left: float = 0.0  # when it ended; below 0: it gave back


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitBytes:
    """The passes of one unit for one micro-batch."""

    forward: PassBytes
    backward_input: PassBytes
    backward_weight: PassBytes  # onto sums of gradients that are there
    only_weight: PassBytes  # of a step's only micro-batch, which leaves gradients with the weights
    own_gradients: float = 0.0  # that the input pass leaves with the weights, added up from there
    recompute: PassBytes = PassBytes()
    offload: PassBytes = PassBytes()
    fetch: PassBytes = PassBytes()


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

    def __init__(self, holdings: Holdings, measured: RankBytes) -> None:
        super().__init__(holdings)
        self._measured = measured
        self._sums: dict[tuple[int, ParameterClass], float] = {}  # bytes before their reduction
        self._reduced: dict[tuple[int, ParameterClass], float] = {}
        self._with_weights: set[int] = set()  # units whose weights have gradients by autograd
        self._received: set[tuple[int, int]] = set()  # streams: unit entered, micro-batch

    def static(self) -> StaticBytes:
        """Return what lies on the chip from step to step: parameters and optimizer state."""
        found = super().static()
        return StaticBytes(parameters=found.parameters, optimizer=found.optimizer)

    def flow(self, kinds: Kinds) -> MemoryFlow:
        """Return what each instruction takes and gives back, from the first to the last.

        Memory is given and taken as the engine issues its list, in order: what an instruction of
        another lane changes counts with the computation that is issued next.
        """
        for state in (self._sums, self._reduced, self._with_weights, self._received):
            state.clear()
        found = [PassBytes()] * len(kinds.listing)
        waiting, last = PassBytes(), -1
        for index, entry in enumerate(kinds.listing):
            waiting = in_order([waiting, self._change(entry)])
            if entry.lane is Lane.COMPUTE:
                found[index], waiting, last = waiting, PassBytes(), index
        if last >= 0:
            found[last] = in_order([found[last], waiting])
        peaks = np.array([each.peak for each in found], dtype=np.float64)
        left = np.array([each.left for each in found], dtype=np.float64)
        return MemoryFlow(self.static(), peaks, peaks - left)

    def effect(self, entry: Instruction) -> tuple[float, float]:
        """Return the bytes that an instruction moves; of host copies, whose time they tell."""
        if entry.what is What.ACTIVATIONS and entry.op in (Op.FETCH, Op.OFFLOAD):
            units = (self._measured.units[u] for u in range(entry.start, entry.stop))
            size = sum(-each.offload.left for each in units)
            return (size, 0.0) if entry.op is Op.FETCH else (0.0, size)
        return super().effect(entry)

    def _change(self, entry: Instruction) -> PassBytes:
        units = range(entry.start, entry.stop)
        match entry.op:
            case Op.FORWARD:
                found = in_order(self._measured.units[u].forward for u in units)
                return PassBytes(found.peak, found.left - sum(map(self._brought, units)))
            case Op.RECOMPUTE:
                return in_order(self._measured.units[u].recompute for u in units)
            case Op.BACKWARD_INPUT:
                return self._input_pass(entry)
            case Op.BACKWARD_WEIGHT:
                return in_order(map(self._unit_weight_pass, reversed(units)))
            case Op.SEND:
                # a stream stays with the unit that made it; a gradient leaves
                sent = self.boundary() if entry.what is What.GRADIENTS else 0.0
                return PassBytes(0.0, -sent)
            case Op.RECEIVE:
                return self._receive(entry)
            case Op.CLIP_NORM:  # the step's tokens are forgotten
                return PassBytes(0.0, -self.num_micro_batches * self._measured.batch)
            case Op.STEP:
                return self._step(entry)
            case Op.GATHER_PARAMETERS | Op.REDUCE_GRADIENTS:
                return self._collective(entry)
            case Op.FETCH | Op.OFFLOAD:
                return self._host_copy(entry)
        return PassBytes()

    # --- passes --------------------------------------------------------------------------

    def _input_pass(self, entry: Instruction) -> PassBytes:
        units = range(entry.start, entry.stop)
        passes: list[PassBytes] = []
        for unit in reversed(units):
            measured = self._measured.units[unit]
            if unit == 0:  # a table's gradient is added at once
                passes.append(self._new_sums(0))
            passes.append(measured.backward_input)
            if unit in self._with_weights:  # an earlier micro-batch's wait for their weight pass
                passes.append(PassBytes(0.0, -measured.own_gradients))
            self._with_weights.add(unit)
        found = in_order(passes)
        given = sum(map(self._brought, units))
        if (entry.start, entry.micro_batch) in self._received:
            self._received.remove((entry.start, entry.micro_batch))
            given += self.boundary()
        return PassBytes(found.peak, found.left - given)

    def _unit_weight_pass(self, unit: int) -> PassBytes:
        measured = self._measured.units[unit]
        if self.num_micro_batches > 1:
            passes = [self._new_sums(unit), measured.backward_weight]
            if unit not in self._with_weights:  # an earlier weight pass took them along
                passes.append(PassBytes(0.0, measured.own_gradients))
            self._with_weights.discard(unit)
            return in_order(passes)
        sums = self._new_sums(unit)
        if self._stays_as_made(unit):
            return measured.only_weight
        # they are copied into one vector with those that travel with them
        made = sum(self._trained(unit, kind) for kind in ParameterClass)
        freed = PassBytes(0.0, -made * self.precision.parameters.num_bytes)
        return in_order([measured.only_weight, sums, freed])

    def _trained(self, unit: int, kind: ParameterClass) -> float:
        """How many gradients a unit's passes make; a tied table's come with the head's."""
        trained = self.holdings.share(unit, kind).trained
        return trained + (self.holdings.tied_above(unit) if kind is ParameterClass.DENSE else 0)

    def _new_sums(self, unit: int) -> PassBytes:
        """Take memory for the sums of a unit's gradients, where they have none."""
        more = 0.0
        for kind in ParameterClass:
            if (unit, kind) not in self._sums:
                size = self._trained(unit, kind) * self.precision.gradients.num_bytes
                self._sums[unit, kind] = size
                more += size
        return PassBytes(more, more)

    # --- messages ------------------------------------------------------------------------

    def _receive(self, entry: Instruction) -> PassBytes:
        """A tensor-parallel group takes slices from the wire and joins them."""
        size, work = self.boundary(), self.holdings.workload
        joined = work.tp > 1 and not work.sequence_parallel
        if entry.what is What.ACTIVATIONS:
            self._received.add((entry.start, entry.micro_batch))
        return PassBytes(size * (1 + 1 / work.tp if joined else 1), size)

    def _collective(self, entry: Instruction) -> PassBytes:
        units = range(entry.start, entry.stop)
        kind = ParameterClass(entry.what.value)
        shares = {unit: self.holdings.share(unit, kind) for unit in units}
        if entry.op is Op.GATHER_PARAMETERS:
            whole = sum(s.trained for s in shares.values()) * self.precision.parameters.num_bytes
            brought = sum(self._gathered(unit, kind) for unit in units)
            return PassBytes(whole + brought, brought)
        passes = []
        for unit, share in shares.items():
            if share.level:  # else they are summed where they are
                kept = share.kept * self.precision.gradients.num_bytes
                sums, known = self._sums.pop((unit, kind), 0.0), self._reduced.get((unit, kind))
                self._reduced[unit, kind] = kept
                passes.append(PassBytes(kept, (kept if known is None else 0.0) - sums))
        return in_order(passes)

    # --- state ---------------------------------------------------------------------------

    def _step(self, entry: Instruction) -> PassBytes:
        units = range(entry.start, entry.stop)
        updated = sum(map(self.optimizer_parameters, units)) * self._measured.update
        given = self._forgotten(units)
        brought = sum(self._parameter_shard(u) for u in units if covers(self.offload.parameters, u))
        return PassBytes(updated + brought, brought - given)

    def _forgotten(self, units: range) -> float:
        """Let gradients go; return their bytes."""
        states = [(unit, kind) for unit in units for kind in ParameterClass]
        return sum(self._sums.pop(key, 0.0) + self._reduced.pop(key, 0.0) for key in states)

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
        taken, given = self.effect(entry)
        return PassBytes(taken, taken - given)
