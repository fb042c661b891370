"""What is left of a running plan after its cluster changed: nodes renumbered, lost copies dropped.

A copy that lost a chip moves to free chips of its pool if there are enough of them; otherwise it
is dropped, and so many copies of the other stages that all stages of its pipeline still take the
same micro-batch. What the pipelines no longer take per micro-batch comes back as more of them.
Where no whole copies make up the batch, smaller micro-batches are dealt out among those that are
left, to none more than it took before. The result goes on without a new search; whether it fits is
the caller's question.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tutti.hardware.cluster import Cluster
from tutti.hardware.topology import Position
from tutti.models.spec import ModelSpec
from tutti.plan.check import check_plan
from tutti.plan.chips import ChipSet
from tutti.plan.files import refer_to_cluster
from tutti.plan.plan import Pipeline, Plan, Replica, Stage
from tutti.search.replan.state_movement import NodeMoves
from tutti.search.thresholds import THRESHOLDS

Copies = list[list[Position]]  # the chips of each copy that is left, of one group of replicas


@dataclass(frozen=True, slots=True)
class _Left:
    """A stage and the copies that are left of each of its groups of replicas."""

    stage: Stage
    copies: tuple[Copies, ...]

    def sums(self) -> int:
        """Return the micro-batches that the copies can make up, as bits."""
        reached = 1
        for replica, copies in zip(self.stage.replicas, self.copies, strict=True):
            for _ in copies:
                reached |= reached << replica.sequences
        return reached

    def most(self) -> int:
        """Return the sequences that all copies take together."""
        pairs = zip(self.stage.replicas, self.copies, strict=True)
        return sum(replica.sequences * len(copies) for replica, copies in pairs)


def surviving_plan(
    old: Plan,
    model: ModelSpec,
    cluster: Cluster,
    moved: NodeMoves | None = None,
    lost: frozenset[Position] = frozenset(),
) -> Plan | None:
    """Return the old plan on the changed cluster; None where nothing valid is left of it.

    `lost` are single chips, by their places in the cluster, that are not to be used.
    """
    places = _Places(old, cluster, moved, lost)
    left = [[places.stage(stage) for stage in pipeline.stages] for pipeline in old.pipelines]
    for dealt in (False, True):
        for micro_batches in _micro_batches(old, left, dealt):
            counts = _counts(old, micro_batches)
            if counts is None:
                continue
            plan = _rebuilt(old, cluster, left, micro_batches, counts, dealt)
            if plan is not None and not check_plan(plan, model, cluster):
                return plan
    return None


class _Places:
    """Where the chips of the old plan are now, and which chips are free."""

    def __init__(
        self,
        old: Plan,
        cluster: Cluster,
        moved: NodeMoves | None,
        lost: frozenset[Position] = frozenset(),
    ) -> None:
        self._lost = lost
        self._sizes = {pool.name: (pool.nodes, pool.node.num_chips) for pool in cluster.pools}
        self._moved = moved
        used = {self._place(chip) for _, _, stage in old.stages() for chip in stage.chips}
        self._free: dict[str, list[Position]] = {
            name: [
                chip
                for node, slot in itertools.product(range(nodes), range(slots))
                if (chip := Position(name, node, slot)) not in used and chip not in lost
            ]
            for name, (nodes, slots) in self._sizes.items()
        }

    def _place(self, chip: Position) -> Position | None:
        here = (chip.pool, chip.node)
        there = here if self._moved is None else self._moved.get(here)
        if there is None:
            return None
        nodes, slots = self._sizes.get(there[0], (0, 0))
        exists = there[1] < nodes and chip.slot < slots
        place = Position(*there, chip.slot) if exists else None
        return None if place in self._lost else place

    def stage(self, stage: Stage) -> _Left:
        return _Left(stage, tuple(self._copies(replica) for replica in stage.replicas))

    def _copies(self, replica: Replica) -> Copies:
        copies: Copies = []
        chips = [self._place(chip) for chip in replica.chips]
        for start in range(0, len(chips), replica.width):
            group = chips[start : start + replica.width]
            whole = [chip for chip in group if chip is not None]
            if len(whole) < replica.width:
                whole = self._take(replica)
            if whole:
                copies.append(whole)
        return copies

    def _take(self, replica: Replica) -> list[Position]:
        """Return free chips of one node for a copy; none where there are too few."""
        by_node: dict[int, list[Position]] = defaultdict(list)
        pool = replica.chips.pools[0]
        for chip in self._free.get(pool, ()):
            by_node[chip.node].append(chip)
        for chips in by_node.values():
            if len(chips) >= replica.width:
                taken = chips[: replica.width]
                self._free[pool] = [c for c in self._free[pool] if c not in taken]
                return taken
        return []


# --- how much each pipeline takes ------------------------------------------------------------


def _micro_batches(
    old: Plan, left: Sequence[Sequence[_Left]], dealt: bool
) -> Iterator[tuple[int, ...]]:
    """Yield micro-batches that all stages of each pipeline can make up, the largest first.

    With `dealt` they need not be made up of what whole copies took before.
    """
    choices: list[list[int]] = []
    for pipeline, stages in zip(old.pipelines, left, strict=True):
        largest = min(pipeline.micro_batch, *(stage.most() for stage in stages))
        sizes = list(range(largest, 0, -1))
        if not dealt:
            common = stages[0].sums()
            for stage in stages[1:]:
                common &= stage.sums()
            sizes = [m for m in sizes if common >> m & 1]
        choices.append(sizes or [0])
    tries = THRESHOLDS.survivor_tries
    if dealt:  # of many pipelines, the first few sizes of each
        few = max(2, round(4096 ** (1 / len(choices)))) if len(choices) > 1 else None
        divisors = [[m for m in sizes if m and old.job.global_batch % m == 0] for sizes in choices]
        choices = [(own or sizes)[:few] for own, sizes in zip(divisors, choices, strict=True)]
    combined = sorted(itertools.islice(itertools.product(*choices), 4096), key=sum, reverse=True)
    yield from (m for m in combined[:tries] if any(m))


def _counts(old: Plan, micro_batches: Sequence[int]) -> list[int] | None:
    """Return how many micro-batches each pipeline does, in the old proportions; None: impossible.

    Rounded down first; then whole micro-batches make up the rest.
    """
    pairs = list(zip(old.pipelines, micro_batches, strict=True))
    able = sum(m * p.micro_batches for p, m in pairs)
    batch = old.job.global_batch
    counts = [max(1, p.micro_batches * batch // able) if m else 0 for p, m in pairs]
    for _ in range(4):
        rest = batch - sum(n * m for n, m in zip(counts, micro_batches, strict=True))
        more = _make_up(rest, sorted({m for m in micro_batches if m}, reverse=True))
        if more is not None:
            for m, count in more.items():
                able_to = [i for i, size in enumerate(micro_batches) if size == m]
                for extra in range(count):
                    counts[able_to[extra % len(able_to)]] += 1
            return counts
        counts = [max(n - 1, 1) if m else 0 for n, m in zip(counts, micro_batches, strict=True)]
    return None


def _make_up(rest: int, sizes: Sequence[int]) -> Mapping[int, int] | None:
    """Return how many of each size add up to `rest`, the larger ones preferred."""
    if rest < 0:
        return None
    if len(sizes) == 1:
        count, over = divmod(rest, sizes[0])
        return None if over else {sizes[0]: count}
    largest, *others = sizes
    for count in range(rest // largest, -1, -1):
        made_up = _make_up(rest - count * largest, others)
        if made_up is not None:
            return {largest: count, **made_up}
    return None


# --- the plan --------------------------------------------------------------------------------


def _rebuilt(
    old: Plan,
    cluster: Cluster,
    left: Sequence[Sequence[_Left]],
    micro_batches: Sequence[int],
    counts: Sequence[int],
    dealt: bool,
) -> Plan | None:
    pipelines: list[Pipeline] = []
    for stages, micro_batch, count in zip(left, micro_batches, counts, strict=True):
        if not micro_batch:
            continue
        kept = [(_dealt if dealt else _stage)(rebuilt, micro_batch) for rebuilt in stages]
        whole = tuple(stage for stage in kept if stage is not None)
        if len(whole) < len(kept):
            return None
        pipelines.append(Pipeline(micro_batch=micro_batch, micro_batches=count, stages=whole))
    alike = not dealt and [len(s.replicas) for _, _, s in old.stages()] == [
        len(s.replicas) for p in pipelines for s in p.stages
    ]
    names = {pool.name for pool in cluster.pools}
    used = {chip for p in pipelines for s in p.stages for chip in s.chips}
    idle = [
        chip
        for pool in cluster.pools
        for node, slot in itertools.product(range(pool.nodes), range(pool.node.num_chips))
        if (chip := Position(pool.name, node, slot)) not in used
    ]
    return replace(
        old,
        cluster=refer_to_cluster(cluster),
        pipelines=tuple(pipelines),
        profiles=tuple(profile for profile in old.profiles if profile.pool in names),
        synchronisation=tuple(
            rule if alike else replace(rule, shares=()) for rule in old.synchronisation
        ),
        collectives=tuple(c for c in old.collectives if set(c.pools) <= names),
        idle=ChipSet.from_ids(idle),
        spare=ChipSet(),
    )


def _stage(left: _Left, micro_batch: int) -> Stage | None:
    """Return a stage with as many copies as make up the micro-batch."""
    groups = [
        (replica.sequences, len(copies))
        for replica, copies in zip(left.stage.replicas, left.copies, strict=True)
    ]
    kept = _choose(groups, micro_batch)
    if kept is None:
        return None
    replicas = tuple(
        replace(replica, count=count, chips=ChipSet.from_ids(itertools.chain(*copies[:count])))
        for replica, copies, count in zip(left.stage.replicas, left.copies, kept, strict=True)
        if count
    )
    return _with_experts(replace(left.stage, replicas=replicas))


def _dealt(left: _Left, micro_batch: int) -> Stage | None:
    """Return a stage with a micro-batch dealt out among its copies, as they shared it before."""
    copies = [
        (replica, chips)
        for replica, group in zip(left.stage.replicas, left.copies, strict=True)
        for chips in group
    ]
    weights = [replica.sequences for replica, _ in copies]
    exact = [micro_batch * weight / sum(weights) for weight in weights]
    sequences = [int(share) for share in exact]
    rest = sorted(range(len(copies)), key=lambda i: sequences[i] - exact[i])
    for i in rest[: micro_batch - sum(sequences)]:
        sequences[i] += 1
    replicas = list[Replica]()
    parts = [(r, n, chips) for (r, chips), n in zip(copies, sequences, strict=True) if n]
    for (_, number), alike in itertools.groupby(parts, key=lambda part: (id(part[0]), part[1])):
        group = list(alike)
        chips = ChipSet.from_ids(itertools.chain(*(own for _, _, own in group)))
        replicas.append(replace(group[0][0], count=len(group), sequences=number, chips=chips))
    return _with_experts(replace(left.stage, replicas=tuple(replicas)))


def _with_experts(stage: Stage) -> Stage | None:
    """Return a stage with as many groups of experts as its chips have; None if one is not whole."""
    if not stage.experts:
        return stage
    group = stage.experts[0]
    groups_left, over = divmod(stage.num_chips, group.chips)
    if len(stage.experts) > 1 or over:
        return None
    return replace(stage, experts=(replace(group, count=groups_left),))


def _choose(groups: Sequence[tuple[int, int]], micro_batch: int) -> list[int] | None:
    """Return how many copies of each (sequences, copies) group add up to the micro-batch."""
    if not groups:
        return [] if micro_batch == 0 else None
    (sequences, most), *others = groups
    for count in range(min(most, micro_batch // sequences), -1, -1):
        chosen = _choose(others, micro_batch - count * sequences)
        if chosen is not None:
            return [count, *chosen]
    return None
