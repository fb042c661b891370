"""Memory of a plan's instructions: nothing leaks, and the published formulas come out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from tests.support.lines import uniform
from tests.support.plans import plans
from tutti.cost.kernels import Kernels
from tutti.cost.memory.instruction_memory import MemoryModel
from tutti.cost.memory.rank_state import RankState
from tutti.cost.plan.equal_instructions import Kinds
from tutti.models.parameters import ParameterClass
from tutti.models.plain_decoder import plain_gpt
from tutti.plan.files import refer_to_model
from tutti.plan.job import PRECISIONS, ScheduleKind
from tutti.plan.plan import ContextKind, Recompute, Synchronisation
from tutti.schedule.instruction import Instruction, Op
from tutti.schedule.schedule import build_schedule


def model_of(schedule, rank_class, kernels=None):
    place = (rank_class.pipeline, rank_class.stage, rank_class.replica)
    rank_state = RankState(schedule.plan, schedule.plan.model.spec, place, kernels or Kernels())
    return MemoryModel(rank_state)


@given(plans())
def test_whatever_is_taken_is_given_back(plan):
    schedule = build_schedule(plan)
    for rank_class in schedule.classes:
        flow = model_of(schedule, rank_class).flow(Kinds.of(rank_class.instructions))
        taken, given_back = flow.allocate.sum(), flow.free.sum()
        assert taken == pytest.approx(given_back, rel=1e-9)
        assert (flow.allocate >= 0).all()
        assert (flow.free >= -1e-6).all()


@pytest.mark.parametrize(
    ("recompute", "sequence_parallel", "factor"),
    [
        ("none", False, lambda a, s, h, t: 10 + 24 / t + 5 * a * s / (h * t)),
        ("none", True, lambda a, s, h, t: 34 / t + 5 * a * s / (h * t)),
        ("selective", True, lambda a, s, h, t: 34 / t),
        ("full", False, lambda a, s, h, t: 2.0),
    ],
)
def test_activations_in_flight_equal_korthikanti(recompute, sequence_parallel, factor):
    """Stage 0 of p holds p micro-batches of L/p layers each: L·s·b·h·(…), their equation 5."""
    layers, hidden, heads, length, tp, stages = 8, 512, 8, 256, 2, 4
    model = plain_gpt(
        layers=layers, hidden=hidden, heads=heads, vocab=1024, sequence_length=length, dropout=0.1
    )
    plan = uniform(stages, 8, ScheduleKind.ONE_F_ONE_B)
    pipeline = plan.pipelines[0]
    cuts = [(0, 3), (3, 5), (5, 7), (7, 10)]
    stage_list = []
    for s, (stage, cut) in enumerate(zip(pipeline.stages, cuts, strict=True)):
        chips = type(stage.chips).of(f"fast/0/{2 * s}-{2 * s + 1}")
        blocks = ((max(cut[0], 1), min(cut[1], layers + 1)),)
        ranges = {
            "none": Recompute(),
            "selective": Recompute(selective=blocks),
            "full": Recompute(full=blocks),
        }
        replica = replace(
            stage.replicas[0],
            chips=chips,
            tp=tp,
            sequence_parallel=sequence_parallel,
            recompute=ranges[recompute],
        )
        stage_list.append(replace(stage, units=(cut,), replicas=(replica,)))
    plan = replace(
        plan,
        model=refer_to_model(model),
        job=replace(plan.job, sequence_length=length),
        pipelines=(replace(pipeline, stages=tuple(stage_list)),),
    )
    schedule = build_schedule(plan)
    memory = model_of(schedule, schedule.classes[1], Kernels(fused_attention=False))
    in_flight = stages - 1  # stage 1: no embedding, no head
    one = sum(memory.rank_state.activations(unit) for unit in range(3, 5))
    expected = length * hidden * factor(heads, length, hidden, tp) * (layers // stages)
    assert one == pytest.approx(expected, rel=1e-9)
    entries = schedule.classes[1].instructions
    flow = memory.flow(Kinds.of(entries))
    from tutti.schedule.instruction import Op

    passes = [i for i, e in enumerate(entries) if e.op in (Op.FORWARD, Op.BACKWARD_WEIGHT)]
    held = np.cumsum(
        [
            sum(memory.rank_state.activations(u) for u in range(entries[i].start, entries[i].stop))
            * (1 if entries[i].op is Op.FORWARD else -1)
            for i in passes
        ]
    )
    assert held.max() == pytest.approx(in_flight * expected, rel=1e-9)
    assert flow.static.total > 0


@pytest.mark.parametrize("policy", ["bf16", "pure_bf16"])
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_shard_levels_divide_what_they_say(level, policy):
    plan = uniform(1, 2, ScheduleKind.ONE_F_ONE_B)
    pipeline = plan.pipelines[0]
    stage = pipeline.stages[0]
    four = replace(stage.replicas[0], chips=type(stage.chips).of("fast/0/0-3"), count=4)
    plan = replace(
        plan,
        job=replace(plan.job, global_batch=8, precision=PRECISIONS[policy]),
        pipelines=(replace(pipeline, micro_batch=4, stages=(replace(stage, replicas=(four,)),)),),
        synchronisation=(Synchronisation(units=(0, plan.model.spec.num_units), shard_level=level),),
    )
    schedule = build_schedule(plan)
    static = model_of(schedule, schedule.classes[0]).static()
    count = sum(
        model_of(schedule, schedule.classes[0]).rank_state.share(u, ParameterClass.DENSE).held
        for u in range(plan.model.spec.num_units)
    )
    # a rank's shard of the parameters is the optimizer's master copy, or a copy of its own
    own = 2 * count / 4 if level and policy == "pure_bf16" else 0.0
    assert static.parameters == pytest.approx((2 * count if level < 3 else 0.0) + own)
    gradients, state = (4, 12) if policy == "bf16" else (2, 4)
    assert static.gradients == pytest.approx(gradients * count / (4 if level >= 2 else 1))
    assert static.optimizer == pytest.approx(state * count / (4 if level >= 1 else 1))


def test_gathered_keys_and_values_need_room():
    """A ring holds one more piece of them, a gather all; in backward their gradients as well."""
    plan = uniform(1, 2, ScheduleKind.ONE_F_ONE_B)
    (stage,) = plan.pipelines[0].stages
    taken = {}
    for kind in ContextKind:
        for cp in (1, 4):
            group = replace(stage.replicas[0], cp=cp, context_kind=kind)
            lines = (replace(plan.pipelines[0], stages=(replace(stage, replicas=(group,)),)),)
            schedule = build_schedule(replace(plan, pipelines=lines))
            memory = model_of(schedule, schedule.classes[0])
            for op in (Op.FORWARD, Op.BACKWARD_INPUT):
                taken[kind, cp, op] = memory.effect(Instruction(op, 0, 1, 2))[0]
    piece = 64 // 4 * 4 * 16 * 2  # tokens · key-value heads · both dimensions · bytes
    for op, times in ((Op.FORWARD, 1), (Op.BACKWARD_INPUT, 2)):
        ring, whole = taken[ContextKind.RING, 4, op], taken[ContextKind.ALL_GATHER, 4, op]
        assert whole - ring == times * 3 * piece
        assert taken[ContextKind.RING, 1, op] == taken[ContextKind.ALL_GATHER, 1, op]
