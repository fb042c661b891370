"""What a search may choose from, and what it is asked: the Space and the Problem.

An option that is None is derived from model and cluster. Everything that narrows a search, from
the command line or in a test, is a field here; the search, its bound and the enumeration that
tests hold it against all read the same Space.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tutti.cost.plan.plan_costs import job_values
from tutti.cost.plan.sources import Sources
from tutti.errors import InputError, hint
from tutti.hardware.cluster import Cluster
from tutti.hardware.pool import Pool
from tutti.models.memory import Recompute
from tutti.models.spec import ModelSpec
from tutti.plan.job import Job, ScheduleKind
from tutti.plan.schedules import kinds_with
from tutti.search.answer.result import Objective
from tutti.search.thresholds import THRESHOLDS

ALL_SCHEDULES = kinds_with(lambda record: record.searched)
ALL_RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
ALL_OFFLOAD = ("optimizer", "activations")


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The strategies that a search may choose from."""

    tp: tuple[int, ...] | None = None
    cp: tuple[int, ...] | None = None
    ep: tuple[int, ...] | None = None
    sequences: tuple[int, ...] | None = None  # per replica and micro-batch
    schedules: tuple[ScheduleKind, ...] = ALL_SCHEDULES
    virtual: tuple[int, ...] = (
        1,
        2,
        3,
        THRESHOLDS.most_virtual,
    )  # unit ranges per stage, if interleaved
    shard: tuple[int, ...] = (0, 1, 2, 3)
    recompute: tuple[Recompute, ...] = ALL_RECOMPUTE
    offload: tuple[str, ...] = ALL_OFFLOAD
    max_stages: int | None = None
    pools: tuple[str, ...] | None = None  # None: all; others stay idle
    uneven_units: bool = True
    uneven_shares: bool = True  # replicas of one stage that take unequally many sequences
    mixed_stages: bool = True  # replicas of unlike chips in one stage
    mixed_pipelines: bool = True  # unlike chips along one pipeline
    max_pipelines: int | None = None  # that differ in chips, cuts or micro-batches
    idle: bool = True  # chips may be left out
    exportable: str | None = None  # the system that must be able to run the plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One question to the planner."""

    model: ModelSpec
    cluster: Cluster
    job: Job
    sources: Sources = field(default_factory=Sources)
    space: Space = Space()
    objective: Objective = Objective.STEP_TIME
    unlimited_memory: bool = False

    @property
    def pools(self) -> tuple[Pool, ...]:
        """The pools that may take part."""
        names = self.space.pools
        if names is None:
            return self.cluster.pools
        for name in names:
            known = [pool.name for pool in self.cluster.pools]
            if name not in known:
                raise InputError(f"--pool-only: no pool is called '{name}'; {hint(name, known)}")
        return tuple(pool for pool in self.cluster.pools if pool.name in names)

    @property
    def num_chips(self) -> int:
        """Chips of the pools that may take part."""
        return sum(pool.num_chips for pool in self.pools)

    def used_cluster(self) -> Cluster:
        """Return the cluster without the pools that may not take part."""
        if self.space.pools is None:
            return self.cluster
        names = {pool.name for pool in self.pools}
        links = tuple(link for link in self.cluster.fabric.links if set(link.pools) <= names)
        fabric = replace(self.cluster.fabric, links=links)
        return replace(self.cluster, pools=self.pools, fabric=fabric)

    def tensor_degrees(self, pool: Pool) -> tuple[int, ...]:
        """Return the tensor-parallel degrees that a pool's nodes and the model allow."""
        return _tensor_degrees(self.model, pool, self.space.tp)

    def all_tensor_degrees(self, pool: Pool) -> tuple[int, ...]:
        """Return all tensor-parallel degrees of the space: also those that leave chips of a node.

        A node of seven chips has no other divisors than 1 and 7, and copies of two chips on six.
        """
        if self.space.tp is not None:
            return self.tensor_degrees(pool)
        most = min(pool.node.num_chips, pool.num_chips)
        wanted = range(1, most + 1)
        return tuple(d for d in wanted if self.model.tensor_parallel_problem(d) is None)

    def context_degrees(self) -> tuple[int, ...]:
        """Return the context-parallel degrees that the search begins with."""
        return self._context_degrees(THRESHOLDS.shortest_local)

    def all_context_degrees(self) -> tuple[int, ...]:
        """Return all context-parallel degrees of the space: parts may be shorter than usual."""
        return self._context_degrees(THRESHOLDS.least_local)

    def _context_degrees(self, shortest: int) -> tuple[int, ...]:
        length = self.job.sequence_length
        if self.space.cp is not None:
            wanted = self.space.cp
        else:
            most = max(1, length // shortest)
            wanted = tuple(1 << i for i in range(most.bit_length()) if 1 << i <= most)
        return tuple(cp for cp in wanted if cp == 1 or length % (2 * cp) == 0)

    def expert_degrees(self) -> tuple[int, ...]:
        """Return over how many chips experts may be spread."""
        experts = self.model.num_experts
        if not experts:
            return (1,)
        if self.space.ep is not None:
            return tuple(ep for ep in self.space.ep if experts % ep == 0)
        return tuple(1 << i for i in range(experts.bit_length()) if experts % (1 << i) == 0)

    def sequence_counts(self) -> tuple[int, ...]:
        """Return how many sequences a replica may take of a micro-batch."""
        wanted = self.space.sequences
        if wanted is None:
            usual, larger = THRESHOLDS.usual_sequences, THRESHOLDS.larger_sequences
            most = self._most_sequences()
            sizes = {*usual, *(b for b in larger if b <= most), *self._divisors(most)}
            wanted = tuple(sorted(sizes))
        return tuple(b for b in wanted if b <= self.job.global_batch) or wanted[:1]

    def all_sequence_counts(self) -> tuple[int, ...]:
        """Return also those that are tried only where they share the batch out better.

        Experts of a step are spread over replicas, whose numbers are powers of two as a rule. Above
        the usual sizes it is every second one, then every fourth, and so on.
        """
        counts = self.sequence_counts()
        if self.space.sequences is not None or self.model.num_experts:
            return counts
        usual, batch = THRESHOLDS.usual_sequences[-1], self.job.global_batch
        most = min(usual, batch, THRESHOLDS.other_tokens // self.job.sequence_length)
        others = {*counts, *range(1, 1 + most)}
        for size in THRESHOLDS.larger_sequences:
            step = size // usual
            others |= {*range(size // 2 + step, 1 + min(size, batch, self._most_sequences()), step)}
        return tuple(sorted(others))

    def local_sequence_counts(self) -> tuple[int, ...]:
        """Return all that a local search may choose, and the bound knows: every size up to 64.

        With experts, up to the largest of the usual ones.
        """
        counts = self.all_sequence_counts()
        if self.space.sequences is not None:
            return counts
        most = THRESHOLDS.usual_sequences[-1]
        if not self.model.num_experts:
            most = max(most, min(THRESHOLDS.local_sequences, self._most_sequences()))
        return tuple(sorted({*counts, *range(1, 1 + min(most, self.job.global_batch))}))

    def _most_sequences(self) -> int:
        """Return with how many sequences products gain nothing more from a larger micro-batch."""
        numbers = self.job.sequence_length * self.model.hidden
        return max(THRESHOLDS.usual_sequences[-1], THRESHOLDS.boundary_numbers // numbers)

    def _divisors(self, most: int) -> set[int]:
        """Return the sizes that divide a batch which the usual ones do not all divide."""
        batch = self.job.global_batch
        if all(batch % b == 0 for b in THRESHOLDS.usual_sequences):
            return set()
        most = min(most, THRESHOLDS.larger_sequences[-1])
        return {b for b in range(1, 1 + most) if batch % b == 0}

    @property
    def has_other_sizes(self) -> bool:
        """Whether micro-batches may have sizes that are not among the usual ones."""
        return self.all_sequence_counts() != self.sequence_counts()

    def with_pool(self, pool: Pool, global_batch: int) -> Problem:
        """Return the same question for one pool alone."""
        return replace(
            self,
            space=replace(self.space, pools=(pool.name,)),
            job=replace(self.job, global_batch=global_batch),
        )

    def pinned_sources(self) -> Sources:
        """Return the sources with one calibration per pool, so that all plans are priced alike."""
        values = job_values(self.job, self.model)
        matches = (self.sources.calibration(pool, **values) for pool in self.cluster.pools)
        chosen = {
            calibration.name: calibration for calibration in matches if calibration is not None
        }
        return replace(self.sources, calibrations=tuple(chosen.values()))


def _tensor_degrees(
    model: ModelSpec, pool: Pool, wanted: tuple[int, ...] | None
) -> tuple[int, ...]:
    """Return divisors of the node's chips (up to all of them) that the model's heads allow."""
    chips = pool.node.num_chips
    degrees = [d for d in range(1, chips + 1) if chips % d == 0] if wanted is None else wanted
    return tuple(
        d for d in degrees if d <= pool.num_chips and model.tensor_parallel_problem(d) is None
    )
