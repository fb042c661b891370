"""What the cost model counts on a rank is what the engine allocates there, element by element."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.any_plan import PLANS
from tests.support.features import drawn_plans
from tests.support.plans import Allocator, small_model
from tutti.accelerator import open_accelerator
from tutti.cost.kernels import Kernels
from tutti.cost.memory.instruction_memory import MemoryModel
from tutti.cost.memory.rank_state import RankState
from tutti.models.parameters import ParameterClass
from tutti.ownership.elements import RankElements
from tutti.plan.files import refer_to_cluster, refer_to_model
from tutti.plan.job import PRECISIONS, Job
from tutti.plan.plan import Pipeline, Plan, RankMap, Replica, Share, Stage, Synchronisation
from tutti.ranks.single_rank import NoLinks
from tutti.schedule.schedule import build_schedule
from tutti.train.engine.engine import Engine

NUM_DRAWN, MANY_DRAWN, MOST_RANKS = 12, 400, 16


class _Group:
    def __init__(self, ranks: Any, rank: int) -> None:
        self.size, self.rank = len(ranks), list(ranks).index(rank)


class _Links(NoLinks):
    """Links of one rank among many; nothing ever travels."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def group(self, ranks: Any, *, use: Any = "block") -> Any:
        return _Group(ranks, self.rank)


def engine_of(plan: Plan, rank: int) -> Engine:
    return Engine(plan, plan.model.spec, rank, open_accelerator("cpu"), _Links(rank), stub=True)


def allocated(engine: Engine) -> dict[str, float]:
    """Return the elements and the bytes of a rank's parameters and their state."""
    states = engine.parameters.all_states()
    stored = {id(p): p for p in engine.model.parameters()}
    optimizer = [
        vector
        for state in states
        for vector in (state.optimizer.mean, state.optimizer.square, state.optimizer.master)
        if vector is not None
    ]
    whole = sum(p.numel() * p.element_size() for p in stored.values())
    gathered = {id(owner): owner for state in states if state.level == 3 for owner in state.owners}
    whole -= sum(p.numel() * p.element_size() for p in gathered.values())
    return {
        "parameters": sum(p.numel() for p in stored.values()),
        "gradients": sum(s.num_kept if s.level >= 2 else s.span.size for s in states),
        "optimizer": sum(s.num_kept for s in states if s.optimizer.mean is not None),
        "bytes": whole + sum(v.numel() * v.element_size() for v in optimizer),
    }


def counted(elements: RankElements, plan: Plan, rank: int) -> dict[str, float]:
    place = RankMap(plan).place(rank)
    stage = plan.pipelines[place.pipeline].stages[place.stage]
    at = rank - elements.ownership.first_rank(place.pipeline, place.stage)
    found = dict.fromkeys(("parameters", "gradients", "optimizer"), 0.0)
    for unit in (u for a, b in stage.units for u in range(a, b)):
        for kind in ParameterClass:
            level = elements.bucket(unit).level(kind)
            own = elements.of((place.pipeline, place.stage), unit, kind)
            found["parameters"] += own.held[at]
            found["gradients"] += own.kept[at] if level >= 2 else own.trained[at]
            found["optimizer"] += own.kept[at] - own.copied[at]
    return found


def check(plan: Plan) -> None:
    spec = plan.model.spec
    assert spec is not None
    elements, ranks = RankElements(plan, spec), RankMap(plan)
    found = [allocated(engine_of(plan, rank)) for rank in range(plan.num_ranks)]
    buffers = _buffers(plan)
    for rank, engine in enumerate(found):
        for what, count in counted(elements, plan, rank).items():
            extra = buffers[rank] if what == "parameters" else 0
            assert count == pytest.approx(engine[what] - extra, abs=0.01), (rank, what)
    for rank_class in build_schedule(plan).classes:
        where = (rank_class.pipeline, rank_class.stage, rank_class.replica)
        members = [r for r in range(plan.num_ranks) if ranks.place(r)[:3] == where]
        rank_state = RankState(plan, spec, where, Kernels(), elements=elements)
        static = MemoryModel(rank_state).static()
        fullest = members[rank_state.rank]
        priced = static.parameters + static.optimizer
        untrained = buffers[fullest] * 4  # kept in float32, whatever the rest is in
        assert priced == pytest.approx(found[fullest]["bytes"] - untrained, rel=1e-9, abs=16)


def _buffers(plan: Plan) -> list[int]:
    """Return the elements of routers' corrections that each rank holds and nobody counts."""
    ranks, found = RankMap(plan), []
    for rank in range(plan.num_ranks):
        place = ranks.place(rank)
        stage = plan.pipelines[place.pipeline].stages[place.stage]
        units = [u for a, b in stage.units for u in range(a, b)]
        parameters = [p for u in units for p in plan.model.spec.parameters(u)]
        found.append(sum(p.size for p in parameters if p.buffer))
    return found


def in_precision(plan: Plan, name: str) -> Plan:
    lines = tuple(
        replace(
            line,
            stages=tuple(
                replace(
                    stage,
                    replicas=tuple(replace(r, offload=type(r.offload)()) for r in stage.replicas),
                )
                for stage in line.stages
            ),
        )
        for line in plan.pipelines
    )  # what lies on the host is counted there
    job = replace(plan.job, precision=PRECISIONS[name], optimizer="adamw")
    return replace(plan, job=job, pipelines=lines)


POLICIES = ("bf16", "pure_bf16", "fp32")


def test_drawn_plans():
    """And those of the named ones that have what is rare among so few."""
    named = [plan for name, plan in PLANS.items() if "experts" in name]
    drawn = drawn_plans(NUM_DRAWN, MOST_RANKS, examples=8 * NUM_DRAWN)
    assert len(drawn) >= NUM_DRAWN
    for number, plan in enumerate((*named, *drawn)):
        check(in_precision(plan, POLICIES[number % 3]))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_hundreds_of_drawn_plans():
    for number, plan in enumerate(drawn_plans(MANY_DRAWN, MOST_RANKS)):
        check(in_precision(plan, POLICIES[number % 3]))


def two_lines(first: dict[str, int], second: dict[str, int], **rule: Any) -> Plan:
    chips, model = Allocator(), small_model(2)
    lines = []
    for words in (first, second):
        width = words.get("tp", 1) * words.get("cp", 1)
        replica = Replica(chips=chips.take("fast", width), **words)
        stage = Stage(units=((0, 4),), replicas=(replica,))
        lines.append(Pipeline(micro_batch=1, micro_batches=4, stages=(stage,)))
    return Plan(
        model=refer_to_model(model),
        cluster=refer_to_cluster(chips.cluster()),
        job=Job(sequence_length=64, global_batch=8),
        pipelines=tuple(lines),
        synchronisation=(Synchronisation(units=(0, 4), shard_level=1, **rule),),
    )


@pytest.mark.parametrize(
    ("first", "second"), [({"tp": 2}, {"tp": 4}), ({"cp": 2}, {}), ({"tp": 4, "cp": 2}, {"tp": 2})]
)
def test_without_shares_all_ranks_keep_equally_much(first, second):
    plan = two_lines(first, second)
    check(plan)
    kept = [allocated(engine_of(plan, rank))["optimizer"] for rank in range(plan.num_ranks)]
    # a few elements apart where norms do not divide by the ranks
    assert max(kept) - min(kept) <= 0.005 * max(kept)


def test_a_share_is_that_of_a_copy_whatever_its_width():
    shares = tuple(Share(pipeline=p, stage=0, replica=0, weight=1) for p in (0, 1))
    plan = two_lines({"cp": 2}, {}, shares=shares)
    check(plan)
    kept = [allocated(engine_of(plan, rank))["optimizer"] for rank in range(3)]
    assert kept[0] + kept[1] == pytest.approx(kept[2], rel=1e-3)
    assert kept[0] == pytest.approx(kept[1], rel=1e-3)


def test_the_copy_of_a_tied_table_has_no_state():
    chips, model = Allocator(), small_model(2, tied=True)
    stages = tuple(
        Stage(units=(cut,), replicas=(Replica(chips=chips.take("fast", 1)),))
        for cut in ((0, 2), (2, 4))
    )
    plan = Plan(
        model=refer_to_model(model),
        cluster=refer_to_cluster(chips.cluster()),
        job=Job(sequence_length=64, global_batch=4),
        pipelines=(Pipeline(micro_batch=1, micro_batches=4, stages=stages),),
        tied_owner=0,
    )
    check(plan)
    last = engine_of(plan, 1)
    copies = [state for state in last.parameters.all_states() if state.span.copied]
    assert len(copies) == 1
    assert copies[0].optimizer.master is copies[0].optimizer.mean is None
    assert copies[0].views[0].dtype is torch.bfloat16
