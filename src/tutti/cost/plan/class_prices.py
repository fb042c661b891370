"""Seconds of the instructions of one class of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from tutti.collective import Operation
from tutti.cost.memory.instruction_memory import MemoryModel
from tutti.cost.memory.rank_state import RankState
from tutti.cost.network.group_links import GroupLinks
from tutti.cost.network.program_choice import Choice, choose_program
from tutti.cost.network.recorded_programs import Asked
from tutti.cost.operators.exposed_communication import AS_PRICED, PerCollective
from tutti.cost.plan.gradient_groups import operation_of
from tutti.cost.plan.matrix_prices import RATE, matrices, matrix_bytes, orthogonal_flops
from tutti.cost.plan.pool_prices import UnitTimes
from tutti.cost.plan.step_context import StepContext
from tutti.cost.plan.unit_seconds import BlockCollectives
from tutti.hardware.chip import Dtype
from tutti.hardware.topology import Position
from tutti.models.parameters import ParameterClass
from tutti.plan.factored_means import MEAN_BYTES, num_means
from tutti.plan.plan import CollectiveUse, Stage, covers
from tutti.schedule.boundary import must_join
from tutti.schedule.instruction import Instruction, Op, Scope, What
from tutti.schedule.schedule import RankClass

COMPUTING = (Op.FORWARD, Op.RECOMPUTE, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
BATCH_ENTRY_BYTES = 24.0  # token, label and position of one place in a sequence


class Price(NamedTuple):
    """How long an instruction occupies its lane, and whether it uses the NIC of its rank."""

    seconds: float
    leaves_node: bool = False


class WantedCollective(NamedTuple):
    """A collective that an instruction asks for; `every` lists the groups that do it at once."""

    use: CollectiveUse
    operation: Operation
    num_bytes: float
    links: GroupLinks
    every: Callable[[], list[tuple[Position, ...]]]


def _alone(chips: tuple[Position, ...]) -> list[tuple[Position, ...]]:
    return [chips]


class ClassPricer:
    """Seconds of the instructions of one class of ranks."""

    def __init__(
        self,
        rank_class: RankClass,
        shared: StepContext,
        rank_state: RankState,
        memory: MemoryModel,
    ) -> None:
        self.rank_class = rank_class
        self.shared = shared
        self.rank_state = rank_state
        self.memory = memory
        self.replica = rank_state.replica
        pool = self.replica.chips.pools[0]
        self.prices = shared.prices[pool]
        self.placement = shared.placement(self.replica)
        self._update = self.prices.updates(memory)
        self._times: dict[tuple[int, PerCollective], UnitTimes] = {}
        self._known: dict[object, Price] = {}
        self._asked: dict[int, Asked] = {}

    @property
    def asked(self) -> tuple[Asked, ...]:
        """Every collective that was priced, with its program."""
        return tuple(one for one in self._asked.values() if one.choice.algorithm != "none")

    def price(self, entry: Instruction) -> Price:
        """Return what an instruction takes; the same in every micro-batch."""
        op, micro_batch, start, stop, what, scope, _ = entry
        key = (id(op), micro_batch < 0, start, stop, id(what), id(scope))  # of enumerations
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._priced(entry)
        return known

    def _priced(self, entry: Instruction) -> Price:
        if entry.op in COMPUTING:
            return Price(self.computed(entry, AS_PRICED))
        handler = {
            Op.SEND: self._send,
            Op.RECEIVE: self._receive,
            Op.GATHER_PARAMETERS: self._collective,
            Op.REDUCE_GRADIENTS: self._collective,
            Op.SYNC_TIED: self._tied,
            Op.CLIP_NORM: self._norm,
            Op.FETCH: self._copy,
            Op.OFFLOAD: self._copy,
            Op.STEP: self._step,
        }[entry.op]
        return handler(entry)

    def computed(self, entry: Instruction, longer: PerCollective) -> float:
        """Return what computing takes, where the collectives inside take so much longer."""
        units = range(entry.start, entry.stop)
        return sum(self._pass(unit, entry.op, longer) for unit in units)

    def block_collectives(self, unit: int) -> BlockCollectives:
        """Return what collectives inside a unit move and take, each once and uncut."""
        return self.prices.block_collectives(
            self.rank_state.workload, unit, self.replica.context_kind, self.placement
        )

    def _pass(self, unit: int, op: Op, longer: PerCollective) -> float:
        times = self._times.get((unit, longer))
        if times is None:
            times = self._times[unit, longer] = self.prices.unit(
                self.rank_state.workload,
                unit,
                self.rank_state.recompute_kind(unit),
                overlap_chunks=self.replica.tp_overlap_chunks,
                context_kind=self.replica.context_kind,
                placement=self.placement,
                wide=not self.shared.plan.job.narrow(unit),
                made_once=self.memory.stays_as_made(unit),
                longer=longer,
            )
        if op is Op.FORWARD:
            return times.forward
        if op is Op.RECOMPUTE:
            return times.recompute
        return times.backward_input if op is Op.BACKWARD_INPUT else times.backward_weight

    def _send(self, entry: Instruction) -> Price:
        wire = self.shared.boundary(self.rank_class.pipeline, entry.start, entry.what)
        return Price(wire.seconds, wire.leaves_node)

    def _receive(self, entry: Instruction) -> Price:
        """Joining the slices of a tensor-parallel group over its own links."""
        del entry
        if not must_join(self.replica):
            return Price(0.0)
        first = self.placement.first  # the worst placed group joins last
        chips = tuple(self.replica.chips.at(first + i) for i in range(self.replica.tp))
        links, size = self.shared.links(chips), self.memory.boundary()
        joined = self._choose("boundary", Operation.ALL_GATHER, size, links)
        return Price(joined.seconds, links.nodes > 1)

    def _choose(
        self, use: CollectiveUse, operation: Operation, num_bytes: float, links: GroupLinks
    ) -> Choice:
        asked = self.shared.ask(use, operation, num_bytes, links)
        self._asked[id(asked)] = asked
        return asked.choice

    def _collective(self, entry: Instruction) -> Price:
        total, leaves = 0.0, False
        for wish in self.wishes(entry):
            total += self._choose(wish.use, wish.operation, wish.num_bytes, wish.links).seconds
            leaves = leaves or wish.links.nodes > 1
        return Price(total, leaves)

    def wishes(self, entry: Instruction) -> list[WantedCollective]:
        """Return the collectives that gathering parameters or reducing gradients asks for."""
        kind = ParameterClass(entry.what.value)
        precision = self.shared.plan.job.precision
        units = range(entry.start, entry.stop)
        shares = [self.rank_state.share(unit, kind) for unit in units]
        level = shares[0].level
        if entry.op is Op.REDUCE_GRADIENTS and level >= 2 and entry.scope is Scope.ALL:
            return self._final_reduction(entry.start, kind)
        count = float(sum(share.trained for share in shares))
        scope = self.rank_class.pipeline if entry.scope is Scope.PIPELINE else None
        links = self.shared.groups.of(entry.start, kind, scope)
        if links is None:
            return []
        gather = entry.op is Op.GATHER_PARAMETERS
        element = precision.gradients.num_bytes
        if gather:
            element = self.prices.kernels.gathered_bytes or self._gathered_bytes(units, level)
        use: CollectiveUse = "parameters" if gather else "gradients"
        operation = operation_of(entry, level)
        every = partial(self.shared.groups.every, entry.start, kind, scope)
        return [WantedCollective(use, operation, count * element, links, every)]

    def _gathered_bytes(self, units: range, level: int) -> float:
        """Return what an element takes on its way: at level 3 as products of 8 bits take it."""
        plan, head = self.shared.plan, self.shared.model.head_unit
        narrow = [level == 3 and 0 < u < head and plan.job.narrow(u) for u in units]
        wide = plan.job.precision.parameters.num_bytes
        return sum(Dtype.FP8.num_bytes if n else wide for n in narrow) / len(narrow)

    def _final_reduction(self, unit: int, kind: ParameterClass) -> list[WantedCollective]:
        """A rank's shard, part by part, with those who keep the part in other pipelines."""
        element = self.shared.plan.job.precision.gradients.num_bytes
        return [
            WantedCollective(
                "gradients", Operation.ALL_REDUCE, count * element, self.shared.links(chips),
                partial(_alone, chips),
            )
            for chips, count in self.shared.final_reductions(unit, kind, self.rank_state)
        ]  # fmt: skip

    def tied_ends(self) -> list[Stage]:
        """Return the stages of this pipeline that hold the tied table: its input, its output."""
        return [
            stage
            for unit in (0, self.shared.model.head_unit)
            for p, _, stage in self.shared.index.of(unit)
            if p == self.rank_class.pipeline
        ]

    def tied_bytes(self, entry: Instruction) -> float:
        """Return what of the tied table a rank sends: nothing of one that is not trained."""
        precision = self.shared.plan.job.precision
        element = precision.gradients if entry.what is What.GRADIENTS else precision.parameters
        model, replica = self.shared.model, self.replica
        if not next(p for p in model.parameters(0) if p.name == "token.weight").trainable:
            return 0.0
        held = 0 if covers(self.rank_state.stage.units, 0) else model.head_unit
        share = self.rank_state.share(held, ParameterClass.DENSE).fraction
        return -(-model.vocab // replica.tp) * model.embedding.dim * element.num_bytes * share

    def _tied(self, entry: Instruction) -> Price:
        """The tied table travels once, in messages, between the stages that hold its two copies."""
        size = self.tied_bytes(entry)
        ends = [stage.replicas[0].chips.at(0) for stage in self.tied_ends()]
        if ends[0] == ends[-1] or not size:
            return Price(0.0)
        links = self.shared.links((ends[0], ends[-1]))
        operation = Operation.BROADCAST if entry.what is What.PARAMETERS else Operation.REDUCE
        cheapest = choose_program(operation, size, links, self.shared.efficiency(links.pools))
        return Price(cheapest.seconds, links.nodes > 1)

    def _norm(self, entry: Instruction) -> Price:
        """Gradients are read; a handful of numbers goes up a tree of all ranks and down again."""
        del entry
        read = self.prices.read_seconds(self.memory.gradient_bytes())
        ranks = self.shared.groups.everyone()
        hop = self.prices.efficiency.hop_s
        return Price(read + (2.0 * math.ceil(math.log2(ranks)) * hop if ranks > 1 else 0.0))

    def _copy(self, entry: Instruction) -> Price:
        if entry.what is What.BATCH:
            moved = self.rank_state.workload.tokens * BATCH_ENTRY_BYTES
        else:
            taken, given = self.memory.effect(entry)
            moved = max(taken, given)
        passing = entry.what in (What.ACTIVATIONS, What.BATCH)  # with every micro-batch
        rate = self.shared.host.lane_bandwidth(self.replica.chips, activations=passing)
        return Price(self.prices.copy_seconds(moved, rate))

    def _step(self, entry: Instruction) -> Price:
        """A bucket's part of the whole stage's optimizer step."""
        update = self._update(entry.start, entry.stop)
        whole = {"muon": self._directions, "adafactor": self._means}
        optimizer = self.shared.plan.job.optimizer
        if optimizer not in whole:
            return Price(update)
        prices = [whole[optimizer](unit) for unit in range(entry.start, entry.stop)]
        return Price(
            update + sum(price.seconds for price in prices),
            any(price.leaves_node for price in prices),
        )

    def _directions(self, unit: int) -> Price:
        """Return what Muon takes to find where a unit's matrices go."""
        shared, model = self.shared, self.shared.model
        own = list(matrices(model, unit))
        chip = shared.cluster.pool(self.replica.chips.pools[0]).chip
        ep = self.rank_state.workload.ep
        products = sum(orthogonal_flops(p, ep) for p in own) / (
            chip.peak_flops(Dtype.FP32, fallback=True) * RATE
        )
        return self._summed(unit, map(matrix_bytes, own), products)

    def _means(self, unit: int) -> Price:
        """Return what Adafactor takes to know a unit's rows and columns: two messages of sums."""
        tensors = [p for p in self.shared.model.parameters(unit) if p.trainable]
        means = sum(num_means(p.shape) for p in tensors)
        return self._summed(unit, (MEAN_BYTES * means, MEAN_BYTES * len(tensors)), 0.0)

    def _summed(self, unit: int, sizes: Iterable[float], computed: float) -> Price:
        """Return what sums of these sizes over a unit's ranks take, beside what is computed."""
        shared, ep = self.shared, self.rank_state.workload.ep
        replicas = [r for _, _, stage in shared.index.of(unit) for r in stage.replicas]
        chips = tuple(r.chips.at(i) for r in replicas for i in range(r.tp * r.cp))
        level = self.rank_state.share(unit, ParameterClass.DENSE).level
        if len(chips) == 1 or (not level and self.replica.tp == 1 and ep == 1):
            return Price(computed)
        links = shared.links(chips)
        sums = (self._choose("gradients", Operation.ALL_REDUCE, size, links) for size in sizes)
        return Price(computed + sum(choice.seconds for choice in sums), links.nodes > 1)
