"""The Plan: which chip holds and computes what. Frozen facts, no behaviour beyond look-ups.

Only the Plan carries a parallel strategy: the planner writes it, the simulator prices it, the
engine executes it. Equal replicas are written once with a count and chips as ranges, so that a
plan for 16,384 chips stays a page of JSON. Ranks are derived: pipelines, stages, replicas, then
context and (fastest) tensor position, in the order in which they stand here.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal, NamedTuple

from tutti.document import Above, AtLeast, AtMost, Count, Natural
from tutti.hardware.cluster import Cluster
from tutti.hardware.topology import Position
from tutti.models.parameters import ParameterClass
from tutti.models.spec import ModelSpec
from tutti.plan.chips import NO_CHIPS, ChipSet
from tutti.plan.job import Job
from tutti.plan.serving import Engine, Route

FORMAT = "tutti-plan/1"

UnitRange = tuple[Natural, Natural]  # half-open
UnitRanges = tuple[UnitRange, ...]
RelativeTime = Annotated[float, Above(0)]


def covers(ranges: UnitRanges, unit: int) -> bool:
    """Tell whether one of the half-open ranges contains the unit."""
    for start, stop in ranges:  # noqa: SIM110 - asked millions of times: a generator costs twice
        if start <= unit < stop:
            return True
    return False


class ContextKind(StrEnum):
    """How a sequence that is split over chips attends to all of itself."""

    RING = "ring"
    ALL_GATHER = "all_gather"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """Units whose activations are recomputed in backward: wholly, or only their bulky part."""

    full: UnitRanges = ()
    selective: UnitRanges = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """Units whose state lives in host memory and is brought to the chip for its use."""

    optimizer: UnitRanges = ()
    parameters: UnitRanges = ()
    gradients: UnitRanges = ()
    activations: UnitRanges = ()

    def kinds(self) -> Iterator[tuple[str, UnitRanges]]:
        """Yield what lives in host memory, with its units."""
        for name in ("optimizer", "parameters", "gradients", "activations"):
            ranges: UnitRanges = getattr(self, name)
            if ranges:
                yield name, ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """`count` equal data-parallel copies of a stage, laid over `chips` one after the other.

    Each copy spans tp · cp chips (tensor position fastest) and takes `sequences` of every
    micro-batch.
    """

    chips: ChipSet
    count: Count = 1
    tp: Count = 1
    cp: Count = 1
    context_kind: ContextKind = ContextKind.RING
    sequence_parallel: bool = False
    tp_overlap_chunks: Count = 1
    sequences: Count = 1
    recompute: Recompute = Recompute()
    offload: Offload = Offload()

    @property
    def width(self) -> int:
        """Chips of one copy."""
        return self.tp * self.cp

    @property
    def num_chips(self) -> int:
        """Chips of all copies."""
        return self.count * self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertGroup:
    """`count` groups of `chips` consecutive chips of a stage that share out all experts.

    `experts` says how many each chip of a group holds; empty means equally many. A stage
    without expert groups keeps every expert in every replica, sliced by tensor parallelism.
    """

    chips: Count
    count: Count = 1
    experts: tuple[Natural, ...] = ()

    def per_chip(self, num_experts: int) -> tuple[int, ...]:
        """Return how many experts each chip of a group holds."""
        if self.experts:
            return self.experts
        bounds = [num_experts * i // self.chips for i in range(self.chips + 1)]
        return tuple(high - low for low, high in itertools.pairwise(bounds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a schedule needs to know of unequal stages; the planner writes it.

    `warm_up` is how many micro-batches may be between forward and backward on this stage;
    the times are relative to each other and to those of the other stages.
    """

    warm_up: Count | None = None
    forward: RelativeTime = 1.0
    backward_input: RelativeTime = 1.0
    backward_weight: RelativeTime = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Consecutive units (several ranges when interleaved) and the chips that compute them."""

    units: UnitRanges
    replicas: tuple[Replica, ...]
    experts: tuple[ExpertGroup, ...] = ()
    order: Order = Order()

    @property
    def num_chips(self) -> int:
        """Chips of all replicas."""
        return sum(replica.num_chips for replica in self.replicas)

    @property
    def num_replicas(self) -> int:
        """Data-parallel width, equal replicas counted each."""
        return sum(replica.count for replica in self.replicas)

    @property
    def num_units(self) -> int:
        """Units of all ranges."""
        return sum(stop - start for start, stop in self.units)

    @property
    def chips(self) -> ChipSet:
        """All chips in rank order."""
        return ChipSet.join(replica.chips for replica in self.replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Stages through which `micro_batches` micro-batches of `micro_batch` sequences pass.

    Where the job serves it is an `engine`, or as many equal ones as its stages have copies.
    """

    micro_batch: Count
    micro_batches: Count
    stages: tuple[Stage, ...]
    engine: Engine | None = None

    @property
    def sequences(self) -> int:
        """Sequences per optimizer step; slots of all copies of an engine."""
        return self.micro_batch * self.micro_batches

    @property
    def copies(self) -> int:
        """Equal engines, where the job serves."""
        return self.stages[0].num_replicas

    @property
    def slots(self) -> int:
        """Sequences at a time of one engine, where the job serves."""
        return self.sequences // self.copies


class ChunkPlace(NamedTuple):
    """One unit range of one stage, in the order in which a micro-batch meets it."""

    start: int
    stop: int
    stage: int


def chunks(pipeline: Pipeline) -> list[ChunkPlace]:
    """Return the unit ranges of all stages by rising unit: the path of a micro-batch."""
    return sorted(
        ChunkPlace(start, stop, index)
        for index, stage in enumerate(pipeline.stages)
        for start, stop in stage.units
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The weight with which each copy of a replica takes part in a ragged shard."""

    pipeline: Natural
    stage: Natural
    replica: Natural
    weight: Natural


@dataclass(frozen=True, slots=True, kw_only=True)
class Synchronisation:
    """How the holders of some units, in all pipelines, keep their parameters the same.

    Level 0 replicates everything, 1 shards the optimizer state, 2 the gradients too, 3 the
    parameters too. `bucket` is how many units travel together. Members are all holders; without
    `shares` their shards are equal.
    """

    units: UnitRange
    parameter_class: ParameterClass = ParameterClass.DENSE
    shard_level: Annotated[int, AtLeast(0), AtMost(3)] = 0
    bucket: Count = 1
    overlap: bool = True
    shares: tuple[Share, ...] = ()


CollectiveUse = Literal["gradients", "parameters", "boundary", "experts", "scalars"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveChoice:
    """Which collective program serves a use up to a size; the cost model chose it.

    `pools` restricts it to groups whose chips come from exactly these pools, `ranks` and `islands`
    to groups of so many ranks in so many islands. The algorithm "auto" leaves the choice to the
    cost model, group by group.
    """

    use: CollectiveUse
    operation: str
    algorithm: str
    pools: tuple[str, ...] = ()
    ranks: Count | None = None
    islands: Count | None = None
    max_bytes: Annotated[float, Above(0)] | None = None
    channels: Count = 1
    chunks: Count = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReference:
    """The planned model, by name and hash, and as a whole where the file embeds it.

    A hash that is left out, as in a plan written by hand, is not checked.
    """

    name: str
    hash: str = ""
    spec: ModelSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterReference:
    """The planned cluster, by name and hash, and as a whole where the file embeds it."""

    name: str
    hash: str = ""
    cluster: Cluster | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileReference:
    """A measured profile that the planner relied on."""

    pool: str
    name: str
    hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A complete strategy for one training step on a cluster, or for serving on it."""

    model: ModelReference
    cluster: ClusterReference
    job: Job
    pipelines: tuple[Pipeline, ...]
    profiles: tuple[ProfileReference, ...] = ()
    synchronisation: tuple[Synchronisation, ...] = ()
    tied_owner: Natural | None = None
    collectives: tuple[CollectiveChoice, ...] = ()
    idle: ChipSet = NO_CHIPS
    spare: ChipSet = NO_CHIPS
    routes: tuple[Route, ...] = ()

    @property
    def num_ranks(self) -> int:
        """Chips that take part."""
        return sum(stage.num_chips for _, _, stage in self.stages())

    def stages(self) -> Iterator[tuple[int, int, Stage]]:
        """Yield (pipeline, stage, Stage) in rank order."""
        for p, pipeline in enumerate(self.pipelines):
            for s, stage in enumerate(pipeline.stages):
                yield p, s, stage

    def holders(self, unit: int) -> Iterator[tuple[int, int, Stage]]:
        """Yield the stages, in all pipelines, that hold a unit."""
        return ((p, s, stage) for p, s, stage in self.stages() if covers(stage.units, unit))

    def synchronisation_of(
        self, unit: int, parameter_class: ParameterClass = ParameterClass.DENSE
    ) -> Synchronisation:
        """Return the rule for a unit; the default where the plan gives none."""
        for rule in self.synchronisation:
            if rule.parameter_class is parameter_class and rule.units[0] <= unit < rule.units[1]:
                return rule
        return Synchronisation(units=(unit, unit + 1), parameter_class=parameter_class)


class RankPlace(NamedTuple):
    """Where one rank stands in a Plan; `replica` names the group, `copy` the member of it."""

    pipeline: int
    stage: int
    replica: int
    copy: int
    cp: int
    tp: int
    chip: Position


class RankMap:
    """Ranks ↔ places ↔ chips of a Plan, without a list per rank."""

    def __init__(self, plan: Plan) -> None:
        self._groups = [
            (p, s, r, replica)
            for p, s, stage in plan.stages()
            for r, replica in enumerate(stage.replicas)
        ]
        sizes = [replica.num_chips for *_, replica in self._groups]
        self._starts = [0, *itertools.accumulate(sizes)]
        self._first: dict[tuple[int, int], int] = {}
        for (p, s, _, _), start in zip(self._groups, self._starts, strict=False):
            self._first.setdefault((p, s), start)

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self._starts[-1]

    def first_rank(self, pipeline: int, stage: int) -> int:
        """Return the rank of a stage's first chip."""
        return self._first[pipeline, stage]

    def place(self, rank: int) -> RankPlace:
        """Return where a rank stands."""
        if not 0 <= rank < self.num_ranks:
            raise IndexError(f"rank {rank} of {self.num_ranks}")
        index = bisect.bisect_right(self._starts, rank) - 1
        p, s, r, replica = self._groups[index]
        local = rank - self._starts[index]
        copy, inner = divmod(local, replica.width)
        cp, tp = divmod(inner, replica.tp)
        return RankPlace(p, s, r, copy, cp, tp, replica.chips.at(local))
