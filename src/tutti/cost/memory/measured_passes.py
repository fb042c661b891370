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
from tutti.schedule.instruction import Instruction, Op, What


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
        self._gradients_of: dict[int, float] = {}  # unit → bytes on the chip now
        self._received: set[tuple[int, int]] = set()  # streams: unit entered, micro-batch

    def static(self) -> StaticBytes:
        """Return what lies on the chip from step to step: parameters and optimizer state."""
        found = super().static()
        return StaticBytes(parameters=found.parameters, optimizer=found.optimizer)

    def flow(self, kinds: Kinds) -> MemoryFlow:
        """Return what each instruction takes and gives back, from the first to the last."""
        self._gradients_of.clear()
        self._received.clear()
        found = [self._change(entry) for entry in kinds.listing]
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
        passes = [self._measured.units[u].backward_input for u in reversed(units)]
        if 0 in units:  # a table's gradient is added at once
            passes.insert(-1, self._new_gradients(0))
        found = in_order(passes)
        given = sum(map(self._brought, units))
        if (entry.start, entry.micro_batch) in self._received:
            self._received.remove((entry.start, entry.micro_batch))
            given += self.boundary()
        return PassBytes(found.peak, found.left - given)

    def _unit_weight_pass(self, unit: int) -> PassBytes:
        measured = self._measured.units[unit]
        if self.num_micro_batches > 1 or covers(self.offload.gradients, unit):
            return in_order([self._new_gradients(unit), measured.backward_weight])
        made, kept = self._made_whole(unit), self._new_gradients(unit)
        if self._stays_as_made(unit):
            return measured.only_weight
        # they are copied into one vector with those that travel with them
        copied = [measured.only_weight, kept, PassBytes(0.0, -made)]
        return in_order(copied)

    def _made_whole(self, unit: int) -> float:
        trained = sum(share.trained for share in self.holdings.shares(unit))
        return (trained + self.holdings.tied_above(unit)) * self.precision.parameters.num_bytes

    def _new_gradients(self, unit: int) -> PassBytes:
        """Take memory for a unit's gradients, unless they have it: until they are reduced."""
        shares = self.holdings.shares(unit)
        trained = sum(share.trained for share in shares) + self.holdings.tied_above(unit)
        size = trained * self.precision.gradients.num_bytes
        more = max(0.0, size - self._gradients_of.get(unit, 0.0))
        self._gradients_of[unit] = size
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
        size = self.precision.gradients.num_bytes
        kept = sum(s.kept for s in shares.values() if s.level) * size
        for unit, share in shares.items():
            if share.level:
                left = self._gradients_of.get(unit, 0.0) - (share.trained - share.kept) * size
                self._gradients_of[unit] = max(left, 0.0)
        whole = sum(s.trained for s in shares.values() if s.level) * size
        return PassBytes(kept, kept - whole)

    # --- state ---------------------------------------------------------------------------

    def _step(self, entry: Instruction) -> PassBytes:
        units = range(entry.start, entry.stop)
        updated = sum(map(self.optimizer_parameters, units)) * self._measured.update
        given = sum(self._gradients_of.pop(unit, 0.0) for unit in units)
        brought = sum(self._parameter_shard(u) for u in units if covers(self.offload.parameters, u))
        return PassBytes(updated + brought, brought - given)

    def _host_copy(self, entry: Instruction) -> PassBytes:
        units = range(entry.start, entry.stop)
        if entry.what is What.BATCH:
            return PassBytes(self._measured.batch, self._measured.batch)
        if entry.what is What.ACTIVATIONS:
            fetched = entry.op is Op.FETCH
            each = (self._measured.units[u] for u in units)
            return in_order(unit.fetch if fetched else unit.offload for unit in each)
        if entry.what is What.GRADIENTS and entry.op is Op.OFFLOAD:
            return PassBytes(0.0, -sum(self._gradients_of.pop(u, 0.0) for u in units))
        taken, given = self.effect(entry)
        return PassBytes(taken, taken - given)
