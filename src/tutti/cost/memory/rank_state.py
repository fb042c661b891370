"""What one rank of a class holds: parameters by unit, the shards of their states, activations.

Who holds and keeps what is the answer of `ownership`, counted. Ranks of a class may differ by a
few elements, where something does not divide evenly; the fullest of them stands for all.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tutti.cost.kernels import Kernels
from tutti.cost.memory.exchange_state import ExchangeState, exchange_states
from tutti.models.memory import Recompute, activation_bytes
from tutti.models.operators import Workload
from tutti.models.parameters import ParameterClass
from tutti.models.spec import ModelSpec
from tutti.ownership.buckets import tied_apart
from tutti.ownership.elements import Elements, RankElements
from tutti.ownership.ownership import tied_ends
from tutti.plan.plan import ExpertGroup, Plan, Replica, Stage, covers

_CLASSES = tuple(ParameterClass)


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


class Share(NamedTuple):
    """What a rank has of a unit's parameters of one class, in elements."""

    level: int  # the shard level that takes effect
    held: int  # computed with
    trained: int  # of these, with a gradient
    kept: float  # whose optimizer state it keeps
    copied: float  # of the kept ones: updated by the owner of tied weights, without state here
    narrow: int = 0  # of the held ones: frozen, and in few bits

    @property
    def updated(self) -> float:
        """How many the rank's optimizer updates."""
        return self.kept - self.copied

    @property
    def fraction(self) -> float:
        """The share of what it trains whose state it keeps."""
        return self.kept / self.trained if self.trained else 1.0


_NO_SHARE = Share(0, 0, 0, 0.0, 0.0)
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
            holders = tuple(self._plan.holders(unit))
            key = tuple((p, s) for p, s, _ in holders)
            self._by_unit[unit] = self._same.setdefault(key, holders)
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


class RankState:
    """Look-ups for the ranks of one replica group, remembered by the kind of unit."""

    def __init__(
        self,
        plan: Plan,
        model: ModelSpec,
        place: tuple[int, int, int],
        kernels: Kernels,
        index: HolderIndex | None = None,
        elements: RankElements | None = None,
    ) -> None:
        self._index = index or HolderIndex(plan)
        self._given = elements
        self.plan = plan
        self.model = model
        self.kernels = kernels
        self.place = place  # pipeline, stage, replica group
        self.stage = plan.pipelines[place[0]].stages[place[1]]
        self.replica = self.stage.replicas[place[2]]
        self.workload = workload_of(plan, self.stage, self.replica, kernels)
        self._activations: dict[tuple[str, str], float] = {}
        self._shares: dict[tuple[int, ParameterClass], Share] = {}
        self._pairs: dict[int, tuple[Share, Share]] = {}  # by unit
        self._unit_kinds = model.unit_kinds
        self._recomputed: dict[int, Recompute] = {}
        self._likenesses: dict[int, int] = {}
        self._numbers: dict[object, int] = {}
        before = sum(replica.num_chips for replica in self.stage.replicas[: place[2]])
        self._ranks = slice(before, before + self.replica.num_chips)  # of the stage's

    @functools.cached_property
    def _elements(self) -> RankElements:
        return self._given or RankElements(self.plan, self.model)

    @functools.cached_property
    def rank(self) -> int:
        """Which rank of the group stands for all: the fullest."""
        return self._fullest()

    def likeness(self, unit: int) -> int:
        """Return a number that units share of which a rank holds and computes the same."""
        number = self._likenesses.get(unit)
        if number is None:
            number = self._numbers.setdefault(self._likeness(unit), len(self._numbers))
            self._likenesses[unit] = number
        return number

    def _likeness(self, unit: int) -> object:
        offload = self.replica.offload
        away = (offload.parameters, offload.gradients, offload.optimizer, offload.activations)
        return (
            self._unit_kinds[unit],
            self.plan.job.narrow(unit),
            self.recompute_kind(unit),
            tuple(covers(ranges, unit) for ranges in away),
            self._index.rules(unit),
            id(self._index.of(unit)),
            self._elements.alike(unit),
        )

    def recompute_kind(self, unit: int) -> Recompute:
        """Return none, selective or full."""
        kind = self._recomputed.get(unit)
        if kind is None:
            done = self.replica.recompute
            kind = "selective" if covers(done.selective, unit) else "none"
            self._recomputed[unit] = kind = "full" if covers(done.full, unit) else kind
        return kind

    def activations(self, unit: int, recompute: Recompute | None = None) -> float:
        """Return the bytes that a unit keeps of one micro-batch."""
        kind = self.recompute_kind(unit) if recompute is None else recompute
        key = (self._unit_kinds[unit], kind)
        if key not in self._activations:
            self._activations[key] = activation_bytes(self.model, unit, self.workload, kind)
        return self._activations[key]

    @property
    def stage_rank(self) -> int:
        """Which rank of the stage the fullest one is."""
        return self._ranks.start + self.rank

    def share(self, unit: int, kind: ParameterClass) -> Share:
        """Return what the rank has of a unit's parameters of a class.

        Experts count as dense where no expert groups spread them.
        """
        key = (self.likeness(unit), kind)
        if key not in self._shares:
            bucket = self._elements.bucket(unit)
            if bucket.rule(kind) is None:  # nothing travels as it
                return _NO_SHARE
            elements, level = self._of(unit, kind), bucket.level(kind)
            at = self.rank
            self._shares[key] = Share(
                level,
                int(elements.held[at]),
                int(elements.trained[at]),
                float(elements.kept[at]),
                float(elements.copied[at]),
                int(elements.narrow[at]),
            )
        return self._shares[key]

    def shares(self, unit: int) -> tuple[Share, Share]:
        """Return what the rank has of a unit: of its dense parameters, and of its experts."""
        pair = self._pairs.get(unit)
        if pair is None:
            dense = self.share(unit, ParameterClass.DENSE)
            pair = self._pairs[unit] = (dense, self.share(unit, ParameterClass.EXPERT))
        return pair

    def _of(self, unit: int, kind: ParameterClass) -> Elements:
        held, trained, kept, copied, narrow = self._elements.of(self.place[:2], unit, kind)
        at = self._ranks
        return Elements(held[at], trained[at], kept[at], copied[at], narrow[at])

    def _fullest(self) -> int:
        """Return which rank of the group holds most bytes of parameters and their state."""
        if self.replica.num_chips == 1:
            return 0
        precision, state = self.plan.job.precision, self.plan.job.state_bytes
        total = np.zeros(self.replica.num_chips)
        alike: dict[int, list[int]] = {}
        for unit in (u for a, b in self.stage.units for u in range(a, b)):
            alike.setdefault(self.likeness(unit), []).append(unit)
        for units in alike.values():
            bucket = self._elements.bucket(units[0])
            for kind in _CLASSES:
                if bucket.rule(kind) is None:  # nothing travels as it
                    continue
                elements, level = self._of(units[0], kind), bucket.level(kind)
                gradients = elements.kept if level >= 2 else elements.trained
                total += len(units) * (
                    elements.held * precision.parameters.num_bytes
                    + gradients * precision.gradients.num_bytes
                    + (elements.kept - elements.copied) * state
                )
        return int(total.argmax())

    def exchange_states(self) -> Iterator[tuple[ParameterClass, ExchangeState]]:
        """Yield what the rank exchanges with others, by parameter class."""
        ownership, place = self._elements.ownership, self.place[:2]
        units = (unit for start, stop in self.stage.units for unit in range(start, stop))
        buckets = {(b := self._elements.bucket(unit)).start: b for unit in units}
        rank = ownership.first_rank(*place) + self.stage_rank
        ends = tied_ends(self.model) if tied_apart(self.plan) else ()
        return exchange_states(ownership, buckets.values(), place, rank, ends)

    def tied_above(self, unit: int) -> int:
        """Return how many of a unit's gradients another one makes: a tied table's, in the head.

        More than its own for the head, as many less for the embedding, where one stage holds both
        and they are one parameter.
        """
        head = self.model.head_unit
        if unit not in (0, head) or not all(covers(self.stage.units, end) for end in (0, head)):
            return 0
        own = {p.name for p in self._elements.ownership.tensors(head)}
        shared = {p.tied_to for p in self.model.parameters(head) if p.name not in own}
        first = (p for p in self.model.parameters(0) if p.trainable)
        tables = (p for p in first if f"0.{p.name}" in shared)
        tied = sum(table.local_size(tp=self.workload.tp) for table in tables)
        return tied if unit else -tied

    def is_shared(self, unit: int) -> bool:
        """Tell whether several chips add up gradients of a unit."""
        return bool(self._elements.bucket(unit).rules())
