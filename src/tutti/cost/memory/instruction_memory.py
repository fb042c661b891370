"""Bytes on one chip: what always lies there, and what each instruction takes and gives back.

Static: parameters, gradients, optimizer states (their shards), communication buffers, what the
runtime itself takes. Moving: activations between forward and weight gradient, what recomputation
brings back, received and sent boundary tensors, gathered parameters, gradients before their
reduction, and whatever offloading keeps only for its use. Summed over the list by the simulator,
this is memory over time under the actual schedule.

A step of one micro-batch has no sum of gradients that lies there throughout: each weight pass makes
its units' gradients, in the place of their activations, and the optimizer's step lets them go.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tutti.cost.memory.optimizer_memory import bytes_of_a_step, means_bytes
from tutti.cost.memory.rank_state import RankState
from tutti.cost.plan.equal_instructions import Kinds
from tutti.models.anatomy import feed_forward_products, rank_kv_heads
from tutti.models.memory import weight_bytes
from tutti.models.parameters import ParameterClass
from tutti.models.tuning import BASE_BYTES
from tutti.plan.plan import ContextKind, UnitRanges, covers
from tutti.schedule.instruction import Instruction, Op, What

FloatArray = npt.NDArray[np.float64]
# Per logit of a backward pass that makes the gradients: exponentials and half the gradient.
LOSS_BYTES = 5.0
TAUGHT_CHUNKS = 5.0  # of logits, that a loss with a teacher has at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """What a runtime takes besides tensors."""

    context_bytes: float = 0.9 * 2**30  # driver context, libraries, communicators
    workspace_bytes: float = 0.3e9  # of matrix products and collectives, inside the allocator
    slack: float = 0.03  # of the tensors' peak: fragmentation and rounding by the allocator


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticBytes:
    """What lies on a chip from step to step."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    buffers: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer + self.buffers


@dataclass(slots=True)
class MemoryFlow:
    """Static bytes, and per instruction what is taken at its start and given back at its end."""

    static: StaticBytes
    allocate: FloatArray
    free: FloatArray


class MemoryModel:
    """The bytes of one class of ranks."""

    def __init__(self, rank_state: RankState) -> None:
        self.rank_state = rank_state
        self.plan = rank_state.plan
        self.precision = rank_state.plan.job.precision
        self.offload = rank_state.replica.offload
        self.units = [u for a, b in rank_state.stage.units for u in range(a, b)]
        self.num_micro_batches = rank_state.plan.pipelines[rank_state.place[0]].micro_batches
        self._parameters: dict[object, float] = {}  # by likeness, as the next one
        self._gathered_bytes: dict[object, float] = {}
        self._effects: dict[object, tuple[float, float]] = {}
        self._static: StaticBytes | None = None

    # --- static --------------------------------------------------------------------------

    def static(self) -> StaticBytes:
        """Return what lies on the chip from step to step."""
        away = self.offload

        def resident(size: Callable[[int], float], offloaded: UnitRanges) -> float:
            return sum(size(u) for u in self.units if not covers(offloaded, u))

        return StaticBytes(
            parameters=resident(self._parameter_shard, away.parameters),
            gradients=resident(self._standing_gradients, away.gradients),
            optimizer=resident(self._optimizer_shard, away.optimizer),
            # one buffer in use, one being filled; and whoever teaches
            buffers=2 * self.boundary() + self._teacher(),
        )

    def _teacher(self) -> float:
        """The weights of a teacher that lies beside the head."""
        model, work = self.rank_state.model, self.rank_state.workload
        if model.teacher is None or model.head_unit not in self.units:
            return 0.0
        beside = replace(work, ep=1, expert_tp=None)
        units = range(model.teacher.num_units)
        return sum(weight_bytes(model.teacher, unit, beside) for unit in units)

    def boundary(self) -> float:
        """Return the bytes of a boundary tensor that a rank owns."""
        work, hidden = self.rank_state.workload, self.rank_state.model.hidden
        return work.own_tokens * hidden * work.element_bytes

    # --- moving --------------------------------------------------------------------------

    def flow(self, kinds: Kinds) -> MemoryFlow:
        """Return what each instruction takes and gives back."""
        effects = {example: self.effect(example) for example in kinds.examples}
        allocate = kinds.spread(lambda example: effects[example][0])
        free = kinds.spread(lambda example: effects[example][1])
        # A received tensor is given back when the pass that uses it ends.
        np.add.at(free, kinds.after_receive, self.boundary())
        if self._static is None:
            self._static = self.static()
        return MemoryFlow(self._static, allocate, free)

    def effect(self, entry: Instruction) -> tuple[float, float]:
        """Return the bytes that an instruction takes at its start and gives back at its end."""
        op, micro_batch, start, stop, what, scope, _ = entry
        key = (id(op), micro_batch < 0, start, stop, id(what), id(scope))  # any micro-batch's
        known = self._effects.get(key)
        if known is None:
            known = self._effects[key] = self._effect(entry)
        return known

    def _effect(self, entry: Instruction) -> tuple[float, float]:
        units = range(entry.start, entry.stop)
        if entry.op is Op.FORWARD:
            passing = max(map(self._forward_buffers, units))
            return sum(map(self._kept, units)) + passing, sum(map(self._brought, units)) + passing
        if entry.op is Op.RECOMPUTE:
            passing = max(map(self._forward_buffers, units))
            return sum(map(self._again, units)) + passing, passing
        if entry.op is Op.BACKWARD_INPUT:
            # Beside keys and values their gradients travel.
            passing = max(self._input_gradients(u) + 2 * self._context_buffers(u) for u in units)
            return passing, passing + sum(map(self._brought, units))  # weights need them no more
        if entry.op is Op.BACKWARD_WEIGHT:
            return self._weight_pass(units)
        if entry.op in (Op.SEND, Op.RECEIVE):
            size = self.boundary()
            return size, size if entry.op is Op.SEND else 0.0
        return self._state_effect(entry)

    def _weight_pass(self, units: range) -> tuple[float, float]:
        """Return what the weight passes of some units take and give back.

        Gradients that are made once take, unit by unit from the last one down, the place of what
        the units above them kept.
        """
        taken = sum(map(self._transient_gradients, units))
        given = sum(self._kept(u) + self._again(u) for u in units)
        if not any(map(self.made_once, units)):
            passing = max(map(self._weight_gradients, units))
            return taken + passing, given + passing
        held = peak = taken
        for unit in reversed(units):
            held += self._made_gradients(unit)
            there = self._head_gradients(unit) if self.stays_as_made(unit) else 0.0
            peak = max(peak, held + self._weight_gradients(unit) - there)
            held -= self._kept(unit) + self._again(unit)
        return peak, peak - held

    def _state_effect(self, entry: Instruction) -> tuple[float, float]:
        units = range(entry.start, entry.stop)
        if entry.op is Op.GATHER_PARAMETERS:
            kind = ParameterClass(entry.what.value)
            return sum(self._gathered(u, kind) for u in units), 0.0
        if entry.op is Op.REDUCE_GRADIENTS and entry.micro_batch >= 0:
            kind = ParameterClass(entry.what.value)
            return 0.0, sum(self._unreduced(u, kind) for u in units)
        if entry.op is Op.STEP:
            updated = (
                self._parameter_shard(u) for u in units if covers(self.offload.parameters, u)
            )
            used = (self._gradient_shard(u) for u in units if covers(self.offload.gradients, u))
            decoded = self.decoded(units)
            return (
                sum(updated) + decoded,
                sum(used) + sum(map(self._made_gradients, units)) + decoded,
            )
        if entry.op not in (Op.FETCH, Op.OFFLOAD):
            return 0.0, 0.0
        size = {
            What.ACTIVATIONS: lambda: sum(self._kept(u) for u in units),
            What.PARAMETERS: lambda: sum(self._parameter_shard(u) for u in units),
            What.GRADIENTS: lambda: sum(self._gradient_shard(u) for u in units),
            What.OPTIMIZER: lambda: sum(self._optimizer_shard(u) for u in units),
        }.get(entry.what, lambda: 0.0)()
        if entry.op is Op.OFFLOAD:
            return 0.0, size
        if entry.what is What.GRADIENTS and entry.micro_batch >= 0:
            return size, size  # added to what the weight pass left, then dropped
        return size, 0.0

    # --- per unit ------------------------------------------------------------------------

    def _kept(self, unit: int) -> float:
        again = self.rank_state.recompute_kind(unit) != "none"
        made = 0.0 if again else self._head_gradients(unit)
        return self.rank_state.activations(unit) + made

    def _again(self, unit: int) -> float:
        """What recomputation brings back for the time of the unit's backward."""
        if self.rank_state.recompute_kind(unit) == "none":
            return 0.0
        more = self.rank_state.activations(unit, "none") - self.rank_state.activations(unit)
        return more + self._head_gradients(unit)

    def _head_gradients(self, unit: int) -> float:
        """The gradient of the head's weight, which its forward pass makes chunk by chunk."""
        model, work = self.rank_state.model, self.rank_state.workload
        if unit != model.head_unit or not work.fused_cross_entropy:
            return 0.0
        weights = (p for p in model.parameters(unit) if p.name == "logits.weight")
        return sum(p.local_size(tp=work.tp) * work.element_bytes for p in weights if p.trainable)

    def _forward_buffers(self, unit: int) -> float:
        """What lives only inside a unit's forward pass: others' keys, or a chunk of logits."""
        model, work = self.rank_state.model, self.rank_state.workload
        if unit != model.head_unit or not work.fused_cross_entropy:
            return self._context_buffers(unit)
        whole = work.element_bytes * work.tokens * model.outputs(work.tp)
        chunk = min(whole, self.rank_state.kernels.logit_chunk_bytes)
        return TAUGHT_CHUNKS * chunk if model.taught else chunk

    def _input_gradients(self, unit: int) -> float:
        """Gradients of activations that live only inside a unit's backward, at their most."""
        model, work = self.rank_state.model, self.rank_state.workload
        if unit == model.head_unit:
            if work.fused_cross_entropy:
                return 0.0
            return LOSS_BYTES * work.tokens * model.outputs(work.tp)
        mlp = model.block(unit).mlp if unit else None
        width = mlp.hidden if mlp is not None else model.hidden
        return 3 * work.element_bytes * work.tokens * width / work.tp

    def _context_buffers(self, unit: int) -> float:
        """Keys and values of others: all of them (gathered), or the piece that a ring passes on."""
        model, work, replica = (
            self.rank_state.model,
            self.rank_state.workload,
            self.rank_state.replica,
        )
        if work.cp == 1 or not 0 < unit < model.head_unit:
            return 0.0
        part = model.block(unit).attention
        heads: float = rank_kv_heads(part.kv_heads, work.tp)
        piece = work.tokens * heads * (part.head_dim + part.value_dim) * work.element_bytes
        return piece * (work.cp if replica.context_kind is ContextKind.ALL_GATHER else 1)

    def _weight_gradients(self, unit: int) -> float:
        """The largest weight's gradient, fresh and as it is added to the sum, beside the rest."""
        model, work = self.rank_state.model, self.rank_state.workload
        mlp = model.block(unit).mlp if 0 < unit < model.head_unit else None
        if mlp is None:
            return 0.0
        way_in, _ = feed_forward_products("mlp", model.hidden, mlp.hidden, mlp.gated, tp=work.tp)
        weight: float = way_in.columns * way_in.depth
        if model.tuning is not None:  # what is frozen has no gradient
            trained = sum(share.trained for share in self.rank_state.shares(unit))
            weight = min(weight, trained)
        added = 0.0 if self.stays_as_made(unit) else self.precision.gradients.num_bytes
        fresh = weight * (work.element_bytes + added)
        return fresh + self._input_gradients(unit)

    def _gathered(self, unit: int, kind: ParameterClass) -> float:
        share = self.rank_state.share(unit, kind)
        return share.trained * self.precision.parameters.num_bytes if share.level == 3 else 0.0

    def _brought(self, unit: int) -> float:
        """Parameters that were gathered or fetched for one pass."""
        key = self.rank_state.likeness(unit)
        if key not in self._gathered_bytes:
            self._gathered_bytes[key] = sum(self._gathered(unit, kind) for kind in ParameterClass)
        fetched = self._parameter_shard(unit) if covers(self.offload.parameters, unit) else 0.0
        return self._gathered_bytes[key] + fetched

    def _parameter_shard(self, unit: int) -> float:
        """What is computed with; where state shards, a flat shard in the same dtype, too.

        The optimizer's master copy, if it is on the chip, is such a shard itself.
        """
        key = self.rank_state.likeness(unit)
        if key not in self._parameters:
            away = covers(self.offload.optimizer, unit)
            elements = 0.0
            for share in self.rank_state.shares(unit):
                elements += share.held - share.trained if share.level == 3 else share.held
                master = self.precision.master is not None
                if share.level and not (master and not (away and share.level == 3)):
                    elements += share.kept
                elif share.level:
                    elements += share.copied
            saved = sum(share.narrow for share in self.rank_state.shares(unit)) * self._saved_bytes
            self._parameters[key] = elements * self.precision.parameters.num_bytes - saved
        return self._parameters[key]

    @property
    def _saved_bytes(self) -> float:
        """What a frozen weight takes less where it is held in few bits."""
        tuning = self.rank_state.model.tuning
        if tuning is None or tuning.base == "wide":
            return 0.0
        return self.precision.parameters.num_bytes - BASE_BYTES[tuning.base]

    def frozen_bytes(self, unit: int) -> float:
        """Return the bytes of parameters that are not trained: every holder has all of them."""
        shares = self.rank_state.shares(unit)
        wide = sum(share.held - share.trained for share in shares)
        narrow = sum(share.narrow for share in shares)
        return wide * self.precision.parameters.num_bytes - narrow * self._saved_bytes

    def _gradients(self, unit: int) -> float:
        """How many gradients of a unit a rank holds between two micro-batches."""
        shares = self.rank_state.shares(unit)
        return sum(share.kept if share.level >= 2 else share.trained for share in shares)

    def _gradient_shard(self, unit: int) -> float:
        return self._gradients(unit) * self.precision.gradients.num_bytes

    def made_once(self, unit: int) -> bool:
        """Tell whether a unit's gradients lie on the chip only from its weight pass to the step.

        From level 2 on they are reduced at once, and what is left of them is a shard.
        """
        if self.num_micro_batches > 1 or covers(self.offload.gradients, unit):
            return False
        return all(share.level < 2 for share in self.rank_state.shares(unit))

    def stays_as_made(self, unit: int) -> bool:
        """Tell whether nothing is added to a unit's gradients: they stay in the weights' dtype."""
        return self.made_once(unit) and not self.rank_state.is_shared(unit)

    def _standing_gradients(self, unit: int) -> float:
        return 0.0 if self.made_once(unit) else self._gradient_shard(unit)

    def _made_gradients(self, unit: int) -> float:
        """Gradients that come with a unit's weight pass; a tied table's come with the head's."""
        if not self.made_once(unit):
            return 0.0
        precision = self.precision
        dtype = precision.parameters if self.stays_as_made(unit) else precision.gradients
        return (self._gradients(unit) + self.rank_state.tied_above(unit)) * dtype.num_bytes

    def gradient_bytes(self) -> float:
        """Return the bytes of all gradients that a rank holds when its step ends."""
        return sum(
            self._made_gradients(u) if self.made_once(u) else self._gradient_shard(u)
            for u in self.units
        )

    def optimizer_parameters(self, unit: int) -> float:
        """Return how many parameters of a unit a rank updates."""
        dense, expert = self.rank_state.shares(unit)
        return dense.updated + expert.updated

    def decoded(self, units: range) -> float:
        """Return what the optimizer takes while weights move: a unit's 8-bit moments at a time."""
        job, model = self.plan.job, self.rank_state.model
        return bytes_of_a_step(job, model, self.units, units, self.optimizer_parameters)

    def _optimizer_shard(self, unit: int) -> float:
        job, state = self.plan.job, self.rank_state
        means = means_bytes(job, state.model, unit, state.workload.ep)
        return self.optimizer_parameters(unit) * job.state_bytes + means

    def _unreduced(self, unit: int, kind: ParameterClass) -> float:
        share = self.rank_state.share(unit, kind)
        return share.trained * self.precision.gradients.num_bytes if share.level >= 2 else 0.0

    def _transient_gradients(self, unit: int) -> float:
        """Gradients that lie whole on the chip only until they are reduced or offloaded."""
        unreduced = sum(self._unreduced(unit, kind) for kind in ParameterClass)
        if covers(self.offload.gradients, unit):
            unreduced += self._gradient_shard(unit)
        return unreduced
