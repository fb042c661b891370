"""The lower bound against plans that no enumeration lists: drawn, and built by hand.

Sixteen chips of two kinds, deep pipelines of uneven cuts, experts, remedies unit by unit. Chips
have no byte more than a plan needs, so that what the bound takes memory to cost is held against it.
The plans built by hand are good ones for a thousand chips.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.support.enumeration import finish, price
from tests.support.instances import dense_first, memory_needs, with_memory
from tutti.hardware import library
from tutti.hardware.cluster import Cluster
from tutti.hardware.fabric import CrossKind, CrossLink, Fabric
from tutti.hardware.node import trimmed
from tutti.hardware.pool import Pool
from tutti.models.plain_decoder import plain_gpt
from tutti.models.spec import ModelSpec
from tutti.plan.job import Job, ScheduleKind
from tutti.plan.plan import Offload, Recompute, UnitRanges
from tutti.search.ask_from_values import make_problem
from tutti.search.bound.lower_bound import lower_bound
from tutti.search.pricing.unit_tables import Config, Tables
from tutti.search.question.space import Problem, Space
from tutti.search.strategy.draft import Draft, PipelineDraft, ReplicaDraft, StageDraft, has_experts

CLOSE = 1e-9
_LAYERS, _LENGTH, _BATCH = 10, 2048, 32
_KINDS = (
    ScheduleKind.ONE_F_ONE_B,
    ScheduleKind.ZERO_BUBBLE,
    ScheduleKind.GPIPE,
    ScheduleKind.INTERLEAVED,
)


def _model(*, experts: bool) -> ModelSpec:
    model = plain_gpt(
        layers=_LAYERS, hidden=2048, heads=16, kv_heads=16, ffn=2048, gated_mlp=True, vocab=32_000,
        sequence_length=_LENGTH, experts=16 if experts else None, topk=2 if experts else None,
        tied=False, name="deep",
    )  # fmt: skip
    return dense_first(model) if experts else model


def _problem(*, experts: bool) -> Problem:
    """Return a question with eight A800 and eight V100, all that a plan may say left open."""
    nodes = library.shipped().nodes
    pools = tuple(
        Pool(name=name, node=trimmed(nodes[node], 4, f"four-{name}"), nodes=2)
        for name, node in (("a", "HGX-A800"), ("v", "DGX-1-V100-32"))
    )
    link = CrossLink(pools=("a", "v"), kind=CrossKind.HOST_FORWARDED, nic_fraction=0.5)
    return Problem(
        model=_model(experts=experts),
        cluster=Cluster(name="c", pools=pools, fabric=Fabric(links=(link,))),
        job=Job(sequence_length=_LENGTH, global_batch=_BATCH),
        space=Space(
            tp=(1, 2),
            cp=(1, 2),
            ep=(1, 2, 4) if experts else (1,),
            sequences=(1, 2, 4),
            schedules=_KINDS,
        ),
    )


_TABLES = {experts: Tables(_problem(experts=experts)) for experts in (False, True)}


def _cut(draw: random.Random, pools: list[str]) -> list[UnitRanges]:
    """Return ranges of at least one unit each, about as long as their chips are fast."""
    speeds = [{"a": 5, "v": 2}[pool] for pool in pools]
    last = _LAYERS + 2
    bounds = [0]
    for index, ahead in enumerate(itertools.accumulate(speeds[:-1]), start=1):
        wished = round(last * ahead / sum(speeds)) + draw.choice((-1, 0, 0, 0, 1))
        bounds.append(min(max(wished, bounds[-1] + 1), last - len(pools) + index))
    return [((a, b),) for a, b in itertools.pairwise((*bounds, last))]


def _some(draw: random.Random, units: UnitRanges, share: float) -> UnitRanges:
    """Return blocks among the units, one by one."""
    blocks = (u for a, b in units for u in range(max(a, 1), min(b, _LAYERS + 1)))
    return tuple((u, u + 1) for u in blocks if draw.random() < share)


def _stage(
    draw: random.Random, pool: str, units: UnitRanges, chips: int, sequences: int, ep: int
) -> StageDraft | None:
    """Return a stage of a few chips that take so many sequences together."""
    tp, cp = draw.choice(((1, 1), (1, 1), (2, 1), (1, 2)))
    copies = chips // (tp * cp)
    if copies == 0 or sequences % copies or chips % ep:
        return None
    each = sequences // copies
    if each not in (1, 2, 4):
        return None
    again = _some(draw, units, draw.choice((0.0, 0.0, 0.3, 1.0)))
    away = _some(draw, units, draw.choice((0.0, 0.0, 0.3, 1.0)))
    away = tuple(span for span in away if span not in again)
    return StageDraft(
        units=units,
        replicas=(
            ReplicaDraft(
                config=Config(pool, tp, cp, ep, each),
                copies=copies,
                recompute=Recompute(full=again),
                offload=Offload(activations=away),
            ),
        ),
    )


def _draft(draw: random.Random, problem: Problem) -> Draft | None:
    """Return a pipeline through all chips of one pool or both; None where pieces do not meet."""
    experts = bool(problem.model.num_experts)
    kind = draw.choice(_KINDS)
    virtual = 2 if kind is ScheduleKind.INTERLEAVED else 1
    chips = draw.choice((1, 2, 4, 8))
    used = draw.choice(("a", "v", "av", "va"))
    pools = [pool for pool in used for _ in range(8 // chips)]
    if len(pools) * virtual > _LAYERS + 2:
        return None
    sequences = draw.choice((1, 2, 4, 8))
    ep = draw.choice((1, 2, 4)) if experts else 1
    ranges = _cut(draw, pools * virtual)
    stages = []
    for index, pool in enumerate(pools):
        units = tuple(itertools.chain.from_iterable(ranges[index :: len(pools)]))
        spread = ep if has_experts(units, problem.model) else 1
        stage = _stage(draw, pool, units, chips, sequences, spread)
        if stage is None:
            return None
        stages.append(stage)
    pipeline = PipelineDraft(micro_batches=_BATCH // sequences, stages=tuple(stages))
    return Draft(pipelines=(pipeline,), schedule=kind, shard=draw.choice((0, 1, 2, 3)))


def _drafts(seed: int, problem: Problem, count: int) -> Iterator[Draft]:
    draw = random.Random(seed)
    made = (_draft(draw, problem) for _ in itertools.count())
    return itertools.islice((draft for draft in made if draft is not None), count)


def _narrowed(problem: Problem, draft: Draft) -> Problem:
    """Return the question with nothing left open but what the draft says: its bound is closer."""
    replicas = [replica for stage in draft.pipelines[0].stages for replica in stage.replicas]
    configs = [replica.config for replica in replicas]
    again = any(replica.recompute.full for replica in replicas)
    away = any(replica.offload.activations for replica in replicas)
    space = replace(
        problem.space,
        tp=tuple(sorted({config.tp for config in configs})),
        cp=tuple(sorted({config.cp for config in configs})),
        ep=tuple(sorted({config.ep for config in configs})),
        sequences=tuple(sorted({config.sequences for config in configs})),
        schedules=(draft.schedule,),
        shard=(draft.shard,),
        recompute=("none", "full") if again else ("none",),
        offload=("activations",) if away else (),
    )
    return replace(problem, space=space)


_SEEDS = [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 40))]


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("seed", _SEEDS)
def test_no_drawn_plan_beats_the_bound_of_chips_that_just_hold_it(experts, seed):
    tables = _TABLES[experts]
    closest = 0.0
    for draft in _drafts(seed, tables.problem, 8):
        priced = price(finish(draft, tables), tables)
        if priced is None:
            continue
        limits = {"a": 1.0, "v": 1.0} | memory_needs(priced)
        just = with_memory(tables.problem, limits)
        for problem in (just, _narrowed(just, draft)):
            bound = lower_bound(tables.for_problem(problem))
            assert bound <= priced.step_seconds * (1 + CLOSE), draft
            closest = max(closest, bound / priced.step_seconds)
    assert closest > 0.4  # it is not held against nothing


# --- a thousand chips ------------------------------------------------------------------------


def _by_hand(
    problem: Problem,
    cut: list[int],
    groups: list[tuple[Config, int, int]],  # with the copies of a stage, and how many stages
    micro_batches: int,
    away: dict[int, int] | None = None,  # range → its leading blocks whose activations go away
) -> PipelineDraft:
    """Return a pipeline whose stages take ranges of the cut in turn."""
    ranges = list(itertools.pairwise(cut))
    configs = [(config, copies) for config, copies, stages in groups for _ in range(stages)]
    stages = []
    for index, (config, copies) in enumerate(configs):
        own = range(index, len(ranges), len(configs))
        units = tuple(ranges[k] for k in own)
        leading = [(max(ranges[k][0], 1), (away or {}).get(k, 0)) for k in own]
        spread = config.ep if has_experts(units, problem.model) else 1
        replica = ReplicaDraft(
            config=config._replace(ep=spread),
            copies=copies,
            offload=Offload(activations=tuple((a, a + count) for a, count in leading if count)),
        )
        stages.append(StageDraft(units=units, replicas=(replica,)))
    return PipelineDraft(micro_batches=micro_batches, stages=tuple(stages))


def _many_experts() -> tuple[Problem, Draft]:
    """DeepSeek-V3: two chains through P800 and A800, and one of Ascend; sequences cut in two."""
    problem = make_problem("deepseek-v3", "B1024", sequence_length=4096, global_batch=4096)
    cut = [0, *range(3, 64, 2)]
    alone = [0, 3, 5, 6, *range(7, 64, 2)]
    chains = [
        _by_hand(
            problem,
            cut,
            [(Config("p800", 1, 2, 8, 1), n, 10), (Config("a800", 1, 2, 8, 1), n, 21)],
            count,
        )
        for n, count in ((8, 292), (4, 291))
    ]
    ascend = _by_hand(problem, alone, [(Config("ascend", 1, 2, 8, 1), 4, 32)], 149)
    return problem, Draft(pipelines=(*chains, ascend), shard=1)


def _dense() -> tuple[Problem, Draft]:
    """GPT-3: one chain of four stages with four ranges each, activations of some blocks away."""
    problem = make_problem("gpt-3-175b", "B1024", sequence_length=2048, global_batch=4096)
    cut = [0, 7, 13, 19, 24, 30, 36, 42, 48, 55, 61, 67, 73, 80, 86, 92, 98]
    away = dict(enumerate((6, 5, 6, 2, 5, 5, 6, 2, 6, 5, 2, 0, 6, 3, 4, 0)))
    groups = [
        (Config("p800", 2, 1, 1, 2), 128, 1),
        (Config("a800", 2, 1, 1, 2), 128, 2),
        (Config("ascend", 8, 1, 1, 8), 32, 1),
    ]
    pipeline = _by_hand(problem, cut, groups, 16, away)
    return problem, Draft(pipelines=(pipeline,), schedule=ScheduleKind.INTERLEAVED, shard=2)


@pytest.mark.slow
@pytest.mark.parametrize("make", [_many_experts, _dense])
def test_no_plan_built_by_hand_beats_the_bound(make):
    problem, draft = make()
    tables = Tables(problem)
    priced = price(finish(draft, tables), tables)
    assert priced is not None
    bound = lower_bound(tables)
    assert 0.7 * priced.step_seconds < bound <= priced.step_seconds
    just = with_memory(problem, memory_needs(priced))
    assert lower_bound(tables.for_problem(just)) <= priced.step_seconds
