"""Random small planning problems, whose spaces together open every pair of a Plan's dimensions.

Instance `i` is made from `i` alone. The pair of dimensions that it must open follows from its
number; two or three more are drawn. Models, clusters and the options of closed dimensions are
drawn, too, and drawn again until the enumeration is small and every open dimension really takes
two values. In a tight instance chips have just the memory that some of the plans need.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace

from tests.support.enumeration import all_drafts, finish, pipelines, price
from tutti.hardware import library
from tutti.hardware.cluster import Cluster
from tutti.hardware.fabric import CrossKind, CrossLink, Fabric
from tutti.hardware.node import trimmed
from tutti.hardware.pool import Pool
from tutti.models.memory import Recompute
from tutti.models.parts import MlpSpec
from tutti.models.plain_decoder import plain_gpt
from tutti.models.spec import ModelSpec, cycle_of
from tutti.plan.job import Job, ScheduleKind
from tutti.search.pricing.unit_tables import Tables
from tutti.search.question.space import Problem, Space
from tutti.search.strategy.draft import Draft, ReplicaDraft
from tutti.simulate.estimate import Estimate

DIMENSIONS = (
    "order",  # of unlike pools along a pipeline
    "units",
    "tp",
    "cp",
    "ep",
    "copies",
    "mixed_stages",
    "shares",
    "pipelines",
    "sequences",
    "schedule",
    "virtual",
    "shard",
    "recompute",
    "offload",
    "idle",
)
PAIRS = tuple(itertools.combinations(DIMENSIONS, 2))
NUM_INSTANCES = 3 * len(PAIRS)
MOST_DRAFTS = 400
_MOST_PIPELINES = {False: 1500, True: 300}  # True: where every pair of them is looked at
_NODES = (
    "HGX-A800", "HGX-H100", "DGX-1-V100-32", "OAM-8xP800", "Atlas-800T-A2-B2", "PCIe-8xL40S",
    "OAM-8xMI300X", "PCIe-4xT4",
)  # fmt: skip
_SCHEDULES = (ScheduleKind.ONE_F_ONE_B, ScheduleKind.ZERO_BUBBLE, ScheduleKind.GPIPE)
_SAMPLED = 16  # plans whose memory decides what is tight


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A problem and the dimensions that its space leaves open."""

    number: int
    open: tuple[str, ...]
    problem: Problem
    tight: bool

    @property
    def name(self) -> str:
        """What a test calls it."""
        return f"{self.number}-{'-'.join(self.open)}"


@functools.lru_cache(maxsize=16)
def make_instance(number: int) -> Instance:
    """Return instance `number`."""
    draw = random.Random(f"tutti instance {number}")
    pair = PAIRS[number % len(PAIRS)]
    rest = [d for d in DIMENSIONS if d not in pair]
    for attempt in itertools.count():
        more = max(1, draw.choice((1, 2, 3)) - attempt // 40)
        opened = _possible(draw, {*pair, *draw.sample(rest, more)})
        problem = _problem(draw, opened)
        if problem is not None and _is_good(problem, opened):
            tight = draw.random() < 0.6
            if tight:
                problem = _tightened(draw, problem)
            return Instance(number=number, open=opened, problem=problem, tight=tight)
    raise AssertionError("unreachable")


def _possible(draw: random.Random, opened: set[str]) -> tuple[str, ...]:
    """Return the dimensions in order, with one that lets a pool be used alone if pools may mix."""
    alone = ("order", "pipelines", "idle")
    if "mixed_stages" in opened and not opened & set(alone):
        opened = opened | {draw.choice(alone)}
    return tuple(d for d in DIMENSIONS if d in opened)


# --- what is open ----------------------------------------------------------------------------


def _replicas(draft: Draft) -> Iterator[ReplicaDraft]:
    for pipeline in draft.pipelines:
        for stage in pipeline.stages:
            yield from stage.replicas


def _order(draft: Draft) -> Hashable:
    lines = [
        tuple(tuple(r.config.pool for r in stage.replicas) for stage in pipeline.stages)
        for pipeline in draft.pipelines
    ]
    return tuple(line if len(set(line)) > 1 else () for line in lines)


def _kinds_of_recompute(draft: Draft) -> Hashable:
    return frozenset(
        (bool(r.recompute.full), bool(r.recompute.selective)) for r in _replicas(draft)
    )


_VALUES: dict[str, Callable[[Draft], Hashable]] = {
    "order": _order,
    "units": lambda d: tuple(p.cut for p in d.pipelines),
    "tp": lambda d: frozenset(r.config.tp for r in _replicas(d)),
    "cp": lambda d: frozenset(r.config.cp for r in _replicas(d)),
    "ep": lambda d: frozenset(r.config.ep for r in _replicas(d)),
    "copies": lambda d: frozenset(r.copies for r in _replicas(d)),
    "mixed_stages": lambda d: any(
        len({r.config.pool for r in s.replicas}) > 1 for p in d.pipelines for s in p.stages
    ),
    "shares": lambda d: any(
        len({r.config.sequences for r in s.replicas}) > 1 for p in d.pipelines for s in p.stages
    ),
    "pipelines": lambda d: len(d.pipelines),
    "sequences": lambda d: frozenset(r.config.sequences for r in _replicas(d)),
    "schedule": lambda d: d.schedule,
    "virtual": lambda d: frozenset(len(s.units) for p in d.pipelines for s in p.stages),
    "shard": lambda d: d.shard,
    "recompute": _kinds_of_recompute,
    "offload": lambda d: frozenset(r.offload for r in _replicas(d)),
    "idle": lambda d: sum(d.chips().values()),
}


def varied(drafts: list[Draft]) -> set[str]:
    """Return the dimensions in which some of the drafts differ."""
    found = {d for d in DIMENSIONS if len({_VALUES[d](draft) for draft in drafts}) > 1}
    depths: dict[Hashable, set[Hashable]] = {}
    for draft in drafts:  # another number of stages is not yet another way to cut
        shape = tuple(tuple(len(s.units) for s in p.stages) for p in draft.pipelines)
        depths.setdefault(shape, set()).add(_VALUES["units"](draft))
    if all(len(cuts) == 1 for cuts in depths.values()):
        found.discard("units")
    return found


def _is_good(problem: Problem, opened: tuple[str, ...]) -> bool:
    """Whether the space is small, and all that is open takes two values at least."""
    most = _MOST_PIPELINES[problem.space.max_pipelines != 1]
    for schedule in problem.space.schedules:
        if sum(1 for _ in itertools.islice(pipelines(problem, schedule), most + 1)) > most:
            return False
    drafts = list(itertools.islice(all_drafts(problem), MOST_DRAFTS + 1))
    return len(drafts) <= MOST_DRAFTS and varied(drafts) >= set(opened)


# --- drawing ---------------------------------------------------------------------------------


def _problem(draw: random.Random, opened: tuple[str, ...]) -> Problem | None:
    mixing = {"order", "mixed_stages", "shares", "pipelines"} & set(opened)
    few = draw.choice((1, 2)) if "pipelines" in opened or "idle" in opened else 1
    kinds = draw.choice((2, 2, 3)) if mixing - {"pipelines"} else few
    cluster = _cluster(draw, kinds)
    if cluster is None:
        return None
    length = draw.choice((512, 1024, 2048))
    model = _model(draw, sparse="ep" in opened or draw.random() < 0.2, length=length)
    job = Job(sequence_length=length, global_batch=draw.choice((2, 3, 4, 4, 6, 8)))
    return Problem(model=model, cluster=cluster, job=job, space=_space(draw, set(opened)))


def _cluster(draw: random.Random, kinds: int) -> Cluster | None:
    names = draw.sample(_NODES, kinds)
    pools = tuple(_pool(draw, index, name) for index, name in enumerate(names))
    if sum(pool.num_chips for pool in pools) > 8:
        return None
    links = tuple(
        CrossLink(
            pools=(one.name, other.name),
            kind=kind,
            nic_fraction=0.5 if kind is CrossKind.HOST_FORWARDED else None,
        )
        for one, other in itertools.combinations(pools, 2)
        for kind in (draw.choice(tuple(CrossKind)),)
    )
    return Cluster(name="drawn", pools=pools, fabric=Fabric(links=links))


def _pool(draw: random.Random, index: int, name: str) -> Pool:
    node = library.shipped().nodes[name]
    chips, nodes = draw.choice(((1, 1), (1, 2), (2, 1), (2, 1), (2, 2), (4, 1), (4, 2), (3, 1)))
    small = trimmed(node, chips, f"{node.name}-first{chips}")
    return Pool(name=f"p{index}", node=small, nodes=nodes)


def _model(draw: random.Random, *, sparse: bool, length: int) -> ModelSpec:
    kind = draw.choice(("dense", "dense", "tied", "vocabulary"))
    model = plain_gpt(
        layers=draw.choice((2, 3, 3, 4, 5)),
        hidden=draw.choice((512, 1024, 2048)),
        heads=8,
        kv_heads=draw.choice((4, 8)),
        ffn=2048,
        gated_mlp=True,
        vocab=256_000 if kind == "vocabulary" else 32_000,
        sequence_length=length,
        experts=4 if sparse else None,
        topk=2 if sparse else None,
        tied=kind == "tied",
        name=f"{'sparse-' if sparse else ''}{kind}",
    )
    return dense_first(model) if sparse and draw.random() < 0.6 else model


def dense_first(model: ModelSpec) -> ModelSpec:
    """Return the model with a first block that has no experts."""
    sparse = model.blocks[0]
    dense = replace(sparse, moe=None, mlp=MlpSpec(hidden=4096))
    cycle = cycle_of([0] + [1] * (model.num_layers - 1))
    return replace(model, name=f"dense-first-{model.name}", blocks=(dense, sparse), cycle=cycle)


def _space(draw: random.Random, opened: set[str]) -> Space:
    schedules, virtual = _schedules(draw, opened)
    deep = opened & {"order", "units", "schedule", "virtual"}
    return Space(
        tp=draw.choice(((1, 2), (2, 4), (1, 2, 4)))
        if "tp" in opened
        else draw.choice(((1,), (2,))),
        cp=(1, 2) if "cp" in opened else draw.choice(((1,), (1,), (1,), (2,))),
        ep=draw.choice(((1, 2), (1, 4), (1, 2, 4))) if "ep" in opened else (1,),
        sequences=_sequences(draw, opened),
        schedules=schedules,
        virtual=virtual,
        shard=_some(draw, (0, 1, 2, 3)) if "shard" in opened else (draw.choice((0, 0, 1, 2, 3)),),
        recompute=_recompute(draw, opened),
        offload=_offload(draw, opened),
        max_stages=draw.choice((2, 2, 3)) if deep else draw.choice((1, 1, 2)),
        uneven_units="units" in opened,
        uneven_shares="shares" in opened,
        mixed_stages=bool(opened & {"mixed_stages", "shares"}),
        mixed_pipelines="order" in opened,
        max_pipelines=2 if "pipelines" in opened else 1,
        idle="idle" in opened,
    )


def _some(draw: random.Random, options: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(draw.sample(options, 2)))


def _sequences(draw: random.Random, opened: set[str]) -> tuple[int, ...]:
    if opened & {"sequences", "shares"}:
        return draw.choice(((1, 2), (1, 2), (2, 4), (1, 3)))
    return (draw.choice((1, 1, 2)),)


def _schedules(
    draw: random.Random, opened: set[str]
) -> tuple[tuple[ScheduleKind, ...], tuple[int, ...]]:
    plain = draw.choice(_SCHEDULES)
    if "virtual" in opened:
        if "schedule" in opened:
            return (plain, ScheduleKind.INTERLEAVED), draw.choice(((2,), (1, 2), (2, 3)))
        return (ScheduleKind.INTERLEAVED,), (2, 3)
    if "schedule" in opened:
        return tuple(draw.sample((*_SCHEDULES, ScheduleKind.INTERLEAVED), 2)), (2,)
    return (plain,), (1,)


def _recompute(draw: random.Random, opened: set[str]) -> tuple[Recompute, ...]:
    pairs: tuple[tuple[Recompute, ...], ...] = (
        ("none", "full"), ("none", "selective"), ("selective", "full"),
        ("none", "selective", "full"),
    )  # fmt: skip
    singles: tuple[tuple[Recompute, ...], ...] = (
        ("none",), ("none",), ("selective",), ("full",),
    )  # fmt: skip
    return draw.choice(pairs if "recompute" in opened else singles)


def _offload(draw: random.Random, opened: set[str]) -> tuple[str, ...]:
    if "offload" not in opened:
        return ()
    kinds = ("optimizer", "activations", "parameters", "gradients")
    return draw.choice((*((kind,) for kind in kinds), kinds[:2]))


def _tightened(draw: random.Random, problem: Problem) -> Problem:
    """Return the problem with chips that hold only some of the plans, seldom none."""
    drafts = list(all_drafts(problem))
    tables = Tables(problem)
    found = [
        memory_needs(priced)
        for draft in draw.sample(drafts, min(_SAMPLED, len(drafts)))
        if (priced := price(finish(draft, tables), tables)) is not None
    ]
    found.sort(key=lambda needs: (sum(needs.values()), sorted(needs.items())))
    if not found:
        return problem
    # One plan that fits, of those that need little; what it leaves idle is as small as can be.
    held = found[draw.randrange(1 + len(found) // 2)]
    scale = 1.001 if draw.random() < 0.9 else 0.9 * min(found[0].values()) / max(held.values())
    limits = {}
    for pool in problem.cluster.pools:
        least = min((n[pool.name] for n in found if pool.name in n), default=0.0)
        limits[pool.name] = scale * held.get(pool.name, least or pool.chip.memory_bytes)
    return with_memory(problem, limits)


def memory_needs(priced: Estimate) -> dict[str, float]:
    """Return the bytes of the fullest chip of each pool that takes part."""
    needs: dict[str, float] = {}
    for memory in priced.memory:
        needs[memory.pool] = max(needs.get(memory.pool, 0.0), memory.total)
    return needs


def with_memory(problem: Problem, limits: Mapping[str, float]) -> Problem:
    """Return the problem with chips of so many bytes."""

    def smaller(pool: Pool) -> Pool:
        chip = replace(pool.chip, memory_bytes=float(math.ceil(limits[pool.name])))
        return replace(pool, node=replace(pool.node, chip=chip))

    pools = tuple(smaller(pool) for pool in problem.cluster.pools)
    return replace(problem, cluster=replace(problem.cluster, pools=pools))
