"""What one rank of a class holds: parameters by unit, the shards of their states, activations.

Counts are exact for the model's tensors; how they are shared follows the Plan's synchronisation
rules. Shares are given per copy of a replica; its tensor and context ranks divide them evenly.
"""

from __future__ import annotations

from dataclasses import dataclass

from tutti.models.memory import Recompute, activation_bytes, local_parameters
from tutti.models.operators import Workload
from tutti.models.parameters import ParameterClass
from tutti.models.spec import ModelSpec
from tutti.plan.plan import ExpertGroup, Plan, Replica, Stage, Synchronisation, covers
from tutti.schedule.buckets import is_shared


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Which kernels a stack computes with, as far as they decide what is kept."""

    fused_attention: bool = True
    fused_cross_entropy: bool = False


def workload_of(
    plan: Plan, stage: Stage, replica: Replica, kernels: Kernels | None = None
) -> Workload:
    """Return the micro-batch that one rank of a replica works on."""
    kernels = kernels or Kernels()
    ep = max(1, _expert_ways(stage, replica))
    return Workload(
        sequences=replica.sequences,
        sequence_length=plan.job.sequence_length,
        tp=replica.tp,
        cp=replica.cp,
        ep=ep,
        sequence_parallel=replica.sequence_parallel,
        fused_attention=kernels.fused_attention,
        fused_cross_entropy=kernels.fused_cross_entropy,
        # Products may run in a narrower format; activations are kept in 16 bits at least.
        element_bytes=max(2.0, plan.job.precision.compute.num_bytes),
    )


def _expert_ways(stage: Stage, replica: Replica) -> int:
    """Over how many chips experts are spread, as the fullest chip of a replica group sees it.

    The chip with most experts sets the pace and the memory of its class; of a replica that is no
    part of the stage, any chip of the stage may be meant.
    """
    first, last, before = 0, stage.num_chips, 0
    for other in stage.replicas:
        if other is replica:
            first, last = before, before + replica.num_chips
            break
        before += other.num_chips
    start, ways = 0, []
    for group in stage.experts:
        stop = start + group.count * group.chips
        low, high = max(first, start), min(last, stop)
        if low < high:
            ways.append(_fullest(group, low - start, high - start))
        start = stop
    return min(ways, default=1)


def _fullest(group: ExpertGroup, start: int, stop: int) -> int:
    """Return the ways of the fullest of some consecutive chips; groups repeat."""
    if not group.experts:
        return group.chips
    positions = range(start, min(stop, start + group.chips))
    most = max(group.experts[position % group.chips] for position in positions)
    return sum(group.experts) // max(1, most)


Holders = tuple[tuple[int, int, Stage], ...]  # pipeline, stage, Stage


class HolderIndex:
    """The stages that hold each unit, looked up once for all classes of a plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._by_unit: dict[int, Holders] = {}
        self._same: dict[tuple[tuple[int, int], ...], Holders] = {}
        self._rules: dict[int, tuple[int, ...]] = {}

    def of(self, unit: int) -> Holders:
        """Return the holders of a unit; units with the same ones get the same object."""
        if unit not in self._by_unit:
            found = tuple(self._plan.holders(unit))
            key = tuple((p, s) for p, s, _ in found)
            self._by_unit[unit] = self._same.setdefault(key, found)
        return self._by_unit[unit]

    def rules(self, unit: int) -> tuple[int, ...]:
        """Return the numbers of the synchronisation rules that a unit falls under."""
        if unit not in self._rules:
            self._rules[unit] = tuple(
                number
                for number, rule in enumerate(self._plan.synchronisation)
                if rule.units[0] <= unit < rule.units[1]
            )
        return self._rules[unit]


class Holdings:
    """Look-ups for the ranks of one replica group, remembered by the kind of unit."""

    def __init__(
        self,
        plan: Plan,
        model: ModelSpec,
        place: tuple[int, int, int],
        kernels: Kernels,
        index: HolderIndex | None = None,
    ) -> None:
        self._index = index or HolderIndex(plan)
        self._shards: dict[tuple[object, int, int], float] = {}
        self.plan = plan
        self.model = model
        self.place = place  # pipeline, stage, replica group
        self.stage = plan.pipelines[place[0]].stages[place[1]]
        self.replica = self.stage.replicas[place[2]]
        self.workload = workload_of(plan, self.stage, self.replica, kernels)
        self._activations: dict[tuple[str, str], float] = {}
        self._parameters: dict[tuple[str, ParameterClass], int] = {}
        self._levels: dict[tuple[int, ParameterClass], int] = {}
        self._unit_kinds = model.unit_kinds
        self._recomputed: dict[int, Recompute] = {}
        self._likenesses: dict[int, object] = {}

    def likeness(self, unit: int) -> object:
        """Return a key that units share of which a rank holds and computes the same."""
        found = self._likenesses.get(unit)
        if found is None:
            found = self._likenesses[unit] = self._likeness(unit)
        return found

    def _likeness(self, unit: int) -> object:
        offload = self.replica.offload
        away = (offload.parameters, offload.gradients, offload.optimizer, offload.activations)
        return (
            self._unit_kinds[unit],
            self.recompute_kind(unit),
            tuple(covers(ranges, unit) for ranges in away),
            self._index.rules(unit),
            id(self._index.of(unit)),
        )

    def recompute_kind(self, unit: int) -> Recompute:
        """Return none, selective or full."""
        found = self._recomputed.get(unit)
        if found is None:
            done = self.replica.recompute
            found = "selective" if covers(done.selective, unit) else "none"
            self._recomputed[unit] = found = "full" if covers(done.full, unit) else found
        return found

    def activations(self, unit: int, recompute: Recompute | None = None) -> float:
        """Return the bytes that a unit keeps of one micro-batch."""
        kind = self.recompute_kind(unit) if recompute is None else recompute
        key = (self._unit_kinds[unit], kind)
        if key not in self._activations:
            self._activations[key] = activation_bytes(self.model, unit, self.workload, kind)
        return self._activations[key]

    def parameters(self, unit: int, kind: ParameterClass) -> int:
        """Return how many parameters of a class a rank computes with (its slices, unsharded).

        Experts count as dense where no expert groups spread them.
        """
        key = (self._unit_kinds[unit], kind)
        if key not in self._parameters:
            work, spread = self.workload, bool(self.stage.experts)
            group = kind if spread else None
            found = 0
            if spread or kind is ParameterClass.DENSE:
                found = local_parameters(self.model, unit, tp=work.tp, ep=work.ep, group=group)
            if kind is ParameterClass.DENSE and unit and covers(self.stage.units, 0):
                found -= self._tied_here(unit)
            self._parameters[key] = found
        return self._parameters[key]

    def updated(self, unit: int, kind: ParameterClass) -> int:
        """Return how many of them this stage's optimizer updates, all shards together.

        The owner of a tied table updates it and sends it to the stage that holds the other copy.
        """
        found, owner = self.parameters(unit, kind), self.plan.tied_owner
        ends = (0, self.model.head_unit)
        if owner is None or kind is not ParameterClass.DENSE or unit == owner or unit not in ends:
            return found
        if all(covers(self.stage.units, end) for end in ends):
            return found
        if unit:
            return found - self._tied_here(unit)
        copied = {p.tied_to for p in self.model.parameters(self.model.head_unit)}
        tp = self.workload.tp
        return found - sum(
            p.local_size(tp=tp, ep=1, expert_tp=tp)
            for p in self.model.parameters(0)
            if f"0.{p.name}" in copied
        )

    def _tied_here(self, unit: int) -> int:
        """Parameters of a unit that are the embedding's own, which this stage holds anyway."""
        tied = (p for p in self.model.parameters(unit) if p.tied_to is not None and not p.buffer)
        tp = self.workload.tp
        return sum(p.local_size(tp=tp, ep=1, expert_tp=tp) for p in tied)

    def tied_above(self, unit: int) -> int:
        """Return how many of a unit's gradients another one makes: a tied table's, in the head.

        More than its own for the head, as many less for the embedding, where one stage holds both.
        """
        head = self.model.head_unit
        if unit not in (0, head) or not all(covers(self.stage.units, end) for end in (0, head)):
            return 0
        return self._tied_here(head) if unit else -self._tied_here(head)

    def is_shared(self, unit: int) -> bool:
        """Tell whether several chips hold some of a unit's parameters."""
        stages = [stage for _, _, stage in self._index.of(unit)]
        return any(
            is_shared(stages, kind, (unit,), self.plan.model.spec) for kind in ParameterClass
        )

    def level(self, unit: int, kind: ParameterClass) -> int:
        """Return the shard level of a unit's parameters; 0 where nobody else holds them."""
        key = (unit, kind)
        if key not in self._levels:
            level = self.plan.synchronisation_of(unit, kind).shard_level
            # Levels 2 and 3 shard inside a pipeline: with one copy there, there is nothing to.
            alone = level >= 2 and self._copies(kind) < 2
            holders = [stage for _, _, stage in self._index.of(unit)]
            shared = not alone and is_shared(holders, kind, (unit,), self.plan.model.spec)
            self._levels[key] = level if shared else 0
        return self._levels[key]

    def _copies(self, kind: ParameterClass) -> int:
        if kind is ParameterClass.EXPERT:
            return sum(group.count for group in self.stage.experts)
        return sum(replica.count * replica.cp for replica in self.stage.replicas)

    def shard(self, unit: int, kind: ParameterClass, level: int) -> float:
        """Return the share of its slices whose state a rank holds, if states of `level` shard."""
        if self.level(unit, kind) < level:
            return 1.0
        rule, holders = self.plan.synchronisation_of(unit, kind), self._index.of(unit)
        key = (kind, id(rule), id(holders))
        if key not in self._shards:
            self._shards[key] = self._share(rule, holders)
        return self._shards[key]

    def _share(self, rule: Synchronisation, holders: Holders) -> float:
        kind = rule.parameter_class
        inside = rule.shard_level >= 2  # levels 2 and 3 shard inside a pipeline
        sharing = [held for held in holders if not inside or held[0] == self.place[0]]
        if kind is ParameterClass.EXPERT:
            groups = sum(group.count for _, _, stage in sharing for group in stage.experts)
            return 1.0 / max(1, groups)
        given = {(s.pipeline, s.stage, s.replica): float(s.weight) for s in rule.shares}
        own, total = 0.0, 0.0
        for p, s, stage in sharing:
            for r, replica in enumerate(stage.replicas):
                weight = given.get((p, s, r), 0.0) if given else float(replica.width)
                total += weight * replica.count
                if (p, s, r) == self.place:
                    own = weight
        # A copy's share of the unit, spread over its ranks, relative to one rank's slices of it.
        return own / total / self.replica.cp
