"""State that moves between plans: hand-worked cases, and laws that hold for any two plans."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.support.plans import (
    NODES,
    SEQUENCE_LENGTH,
    Allocator,
    models,
    pipelines,
    rules,
    small_model,
)
from tutti.document import Place
from tutti.errors import InputError
from tutti.hardware.cluster import Cluster
from tutti.models.load import load_model
from tutti.models.parameters import ParameterClass
from tutti.ownership.buckets import tied_apart
from tutti.ownership.elements import RankElements
from tutti.plan.check import check_plan
from tutti.plan.chips import ChipSet
from tutti.plan.files import refer_to_cluster, refer_to_model
from tutti.plan.job import PRECISIONS, Job, ScheduleKind
from tutti.plan.plan import Pipeline, Plan, Replica, Share, Stage, Synchronisation, covers
from tutti.plan.uniform import Degrees, uniform_plan
from tutti.search.question.what_if import change_cluster
from tutti.search.replan.replan import movement_text
from tutti.search.replan.state_layout import StateLayout
from tutti.search.replan.state_movement import movement, payback

FEW = settings(max_examples=max(20, settings.default.max_examples // 4))
STATE = 4 + 4 + 4  # fp32 master copy and two moments
MODEL = small_model(4)
PER_UNIT = [sum(p.size for p in MODEL.parameters(unit)) for unit in range(MODEL.num_units)]


def cluster_of(nodes=2, **more):
    pools = [{"name": "a", "node": "HGX-A800", "nodes": nodes}]
    return Cluster.from_document({"name": "small", "pools": pools, **more}, Place("small"))


def plan_of(cluster, stages, *, level=0, shares=(), model=MODEL, **job):
    """Stages are (units, chips, degrees) with one replica group each."""
    made = tuple(
        Stage(units=(units,), replicas=(Replica(chips=ChipSet.of(*chips), **degrees),))
        for units, chips, degrees in stages
    )
    micro_batch = made[0].num_replicas
    rule = Synchronisation(units=(0, model.num_units), shard_level=level, shares=shares)
    plan = Plan(
        model=refer_to_model(model),
        cluster=refer_to_cluster(cluster),
        job=Job(sequence_length=SEQUENCE_LENGTH, global_batch=4 * micro_batch, **job),
        pipelines=(Pipeline(micro_batch=micro_batch, micro_batches=4, stages=made),),
        synchronisation=(rule,) if level else (),
    )
    assert check_plan(plan) == []
    return plan


def test_a_plan_that_stays_moves_nothing():
    cluster = cluster_of()
    plan = plan_of(cluster, [((0, 6), ["a/0-1/0-7"], {"tp": 4, "count": 4})], level=1)
    found = movement(plan, plan, MODEL, cluster)
    assert (found.total_bytes, found.seconds, found.busiest_chip_bytes) == (0, 0, 0)
    assert found.by_pool == {"a": 0}
    assert not found.rolls_back


def test_two_stages_that_swap_move_all_of_both():
    cluster = cluster_of()
    old = plan_of(cluster, [((0, 3), ["a/0/0"], {}), ((3, 6), ["a/1/0"], {})])
    new = plan_of(cluster, [((0, 3), ["a/1/0"], {}), ((3, 6), ["a/0/0"], {})])
    found = movement(old, new, MODEL, cluster)
    assert found.total_bytes == STATE * sum(PER_UNIT)
    assert found.from_checkpoint_bytes == 0
    larger = STATE * max(sum(PER_UNIT[:3]), sum(PER_UNIT[3:]))
    assert found.busiest_chip_bytes == larger
    assert found.seconds == pytest.approx(larger / 25e9)


def test_a_cut_that_shifts_moves_the_units_between():
    cluster = cluster_of()
    old = plan_of(cluster, [((0, 3), ["a/0/0"], {}), ((3, 6), ["a/1/0"], {})])
    new = plan_of(cluster, [((0, 2), ["a/0/0"], {}), ((2, 6), ["a/1/0"], {})])
    assert movement(old, new, MODEL, cluster).total_bytes == STATE * PER_UNIT[2]


def test_twice_the_tensor_parallelism_on_the_same_chips():
    """Chips 0…3 hold halves 0, 1, 0, 1 and need quarters 0, 1, 2, 3: chips 1 and 2 lack theirs."""
    cluster = cluster_of(1)
    old = plan_of(cluster, [((0, 6), ["a/0/0-3"], {"tp": 2, "count": 2})])
    new = plan_of(cluster, [((0, 6), ["a/0/0-3"], {"tp": 4})])
    parameters = [p for unit in range(6) for p in MODEL.parameters(unit)]
    sliced = sum(p.size for p in parameters if p.slice_dim is not None)
    found = movement(old, new, MODEL, cluster)
    assert found.total_bytes == pytest.approx(STATE * 2 * sliced / 4)
    # Back: every chip keeps its quarter where the half has it, and lacks a quarter or a half.
    back = movement(new, old, MODEL, cluster)
    assert back.total_bytes == pytest.approx(STATE * (1 + 2 + 2 + 1) * sliced / 4)


def test_few_heads_are_held_by_several_ranks():
    """Two key-value heads over tp 4: neighbours hold the same one, and nothing moves but halves."""
    model = small_model(2, heads=4)
    cluster = cluster_of(1)
    four = plan_of(cluster, [((0, 4), ["a/0/0-3"], {"tp": 4})], model=model)
    everything = movement(four, four, model, cluster, moved={})
    held = 0
    for unit in range(model.num_units):
        held += 4 * sum(p.local_size(tp=4) for p in model.parameters(unit))
    assert everything.total_bytes == pytest.approx(STATE * held)


def test_sharded_state_moves_in_its_shares():
    """Shares 1:1 become 3:1 over two copies: chip 0 lacks a quarter of the optimizer's state."""
    cluster = cluster_of(1)
    stages = [((0, 6), ["a/0/0"], {}), ((0, 6), ["a/0/1"], {})]

    def plan(weights):
        shares = tuple(
            Share(pipeline=0, stage=0, replica=r, weight=w) for r, w in enumerate(weights)
        )
        both = plan_of(cluster, stages[:1])
        stage = Stage(
            units=((0, 6),),
            replicas=(Replica(chips=ChipSet.of("a/0/0")), Replica(chips=ChipSet.of("a/0/1"))),
        )
        rule = Synchronisation(units=(0, 6), shard_level=1, shares=shares)
        job = replace(both.job, global_batch=8)
        pipeline = Pipeline(micro_batch=2, micro_batches=4, stages=(stage,))
        made = replace(both, job=job, pipelines=(pipeline,), synchronisation=(rule,))
        assert check_plan(made) == []
        return made

    found = movement(plan((1, 1)), plan((3, 1)), MODEL, cluster)
    assert found.total_bytes == pytest.approx(STATE * sum(PER_UNIT) / 4)
    found = movement(plan((3, 1)), plan((1, 1)), MODEL, cluster)
    assert found.total_bytes == pytest.approx(STATE * sum(PER_UNIT) / 4)


def test_a_lost_node_whose_state_others_hold_needs_no_checkpoint():
    cluster = cluster_of(3)
    degrees = {"tp": 8, "count": 2}
    old = plan_of(cluster, [((0, 6), ["a/0-1/0-7"], degrees)], model=small_model(4, heads=16))
    model = small_model(4, heads=16)
    change = change_cluster(cluster, "-node 0")
    new = plan_of(change.cluster, [((0, 6), ["a/0-1/0-7"], degrees)], model=model)
    found = movement(old, new, model, change.cluster, change.moved)
    assert found.from_checkpoint_bytes == 0
    # Node 1 became node 0 and has all; the spare node, now 1, takes a whole copy.
    whole = movement(old, new, model, change.cluster, moved={}).total_bytes / 2
    assert found.total_bytes == pytest.approx(whole)


def test_a_lost_node_without_a_copy_is_read_from_the_checkpoint():
    storage = {"file_system": {"read_bandwidth": 2e9, "write_bandwidth": 1e9}}
    cluster = cluster_of(3, storage=storage)
    old = plan_of(cluster, [((0, 3), ["a/0/0"], {}), ((3, 6), ["a/1/0"], {})])
    change = change_cluster(cluster, "-node 1")
    new = plan_of(change.cluster, [((0, 3), ["a/0/0"], {}), ((3, 6), ["a/1/0"], {})])
    found = movement(old, new, MODEL, change.cluster, change.moved)
    lost = STATE * sum(PER_UNIT[3:])
    assert found.from_checkpoint_bytes == found.total_bytes == lost
    assert found.rolls_back
    assert found.seconds == pytest.approx(lost / 2e9)


def test_how_long_a_checkpoint_takes_is_not_known_without_its_storage():
    cluster = cluster_of(3)
    old = plan_of(cluster, [((0, 3), ["a/0/0"], {}), ((3, 6), ["a/1/0"], {})])
    change = change_cluster(cluster, "-node 1")
    new = plan_of(change.cluster, [((0, 3), ["a/0/0"], {}), ((3, 6), ["a/1/0"], {})])
    found = movement(old, new, MODEL, change.cluster, change.moved)
    assert found.from_checkpoint_bytes == STATE * sum(PER_UNIT[3:])
    assert not found.storage_known
    assert found.seconds == 0  # nothing moves between chips
    assert "how long that takes is not known" in movement_text(found)
    assert " ms" not in movement_text(found)
    nothing = movement(old, old, MODEL, cluster)
    assert nothing.storage_known


def test_losing_a_shard_of_the_optimizer_loses_only_that():
    cluster = cluster_of(2)
    old = plan_of(cluster, [((0, 6), ["a/0/0", "a/1/0"], {"count": 2})], level=1)
    change = change_cluster(cluster, "-node 1")
    new = plan_of(change.cluster, [((0, 6), ["a/0/0"], {})])
    found = movement(old, new, MODEL, change.cluster, change.moved)
    assert found.total_bytes == found.from_checkpoint_bytes
    assert found.total_bytes == pytest.approx(STATE * sum(PER_UNIT) / 2)


def test_tied_tables_are_one_table():
    """The head's stage moves next to the embedding, which has the table already."""
    model = small_model(2, tied=True)
    cluster = cluster_of(1)
    both = plan_of(cluster, [((0, 4), ["a/0/0"], {})], model=model)
    apart = replace(
        plan_of(cluster, [((0, 4), ["a/0/0"], {})], model=model),
        tied_owner=0,
        pipelines=(
            Pipeline(
                micro_batch=1,
                micro_batches=4,
                stages=(
                    Stage(units=((0, 3),), replicas=(Replica(chips=ChipSet.of("a/0/1")),)),
                    Stage(units=((3, 4),), replicas=(Replica(chips=ChipSet.of("a/0/0")),)),
                ),
            ),
        ),
    )
    assert check_plan(apart) == []
    found = movement(both, apart, model, cluster)
    first = sum(p.size for unit in range(3) for p in model.parameters(unit))
    assert found.total_bytes == STATE * first  # chip 0 keeps the table and the last norm
    # back again: the table comes from its owner, and with it the optimizer's state of it
    assert movement(apart, both, model, cluster).total_bytes == STATE * first


def test_a_plan_for_another_cluster_is_refused():
    plan = plan_of(cluster_of(2), [((0, 6), ["a/1/0"], {})])
    with pytest.raises(InputError, match=r"chip a/1/0 is not in cluster 'small'"):
        movement(plan, plan, MODEL, cluster_of(1))


def test_state_that_crosses_pools_is_limited_by_their_link():
    pools = [{"name": "a", "node": "HGX-A800"}, {"name": "k", "node": "OAM-8xP800"}]
    cluster = Cluster.from_document({"name": "two", "pools": pools}, Place("two"))
    old = plan_of(cluster, [((0, 6), ["a/0/0"], {})])
    new = plan_of(cluster, [((0, 6), ["k/0/0"], {})])
    slow = change_cluster(cluster, "link a k 0.5").cluster
    first, second = (movement(old, new, MODEL, c) for c in (cluster, slow))
    assert second.seconds == pytest.approx(2 * first.seconds)
    assert first.by_pool == {"a": 0, "k": STATE * sum(PER_UNIT)}


@pytest.mark.parametrize(
    ("old", "new", "move", "lost", "expected"),
    [
        (2.0, 1.0, 10.0, 0, 20.0),  # 10 s pause; after 20 s both have done 10 steps
        (2.0, 1.0, 10.0, 10, 40.0),
        (1.0, 1.0, 10.0, 0, None),
        (1.0, 2.0, 0.0, 0, None),
        (1.0, 1.0, 0.0, 0, 0.0),
        (None, 9.0, 100.0, 5, 0.0),
        (float("inf"), 9.0, 100.0, 5, 0.0),
    ],
)
def test_payback(old, new, move, lost, expected):
    assert payback(old, new, move, steps_lost=lost) == expected


def test_a_trillion_parameters_on_16384_chips_are_worked_out_at_once():
    cluster, model = Cluster.load("H16384"), load_model("gpt-1t")
    job = Job(sequence_length=2048, global_batch=16384)
    old = uniform_plan(model, cluster, job, Degrees(tp=8, pp=32, shard=1))
    new = uniform_plan(model, cluster, job, Degrees(tp=4, pp=64, shard=3))
    start = time.process_time()
    found = movement(old, new, model, cluster)
    assert time.process_time() - start < 30  # 0.2 s on an idle machine
    assert found.total_bytes > 0


# --- laws ------------------------------------------------------------------------------------


@st.composite
def pairs(draw):
    """Two valid plans for one model on one cluster, and its cluster."""
    model, kind = draw(models()), draw(st.sampled_from(ScheduleKind))
    allocators = Allocator(), Allocator()
    lines = [draw(pipelines(model, kind, chips)) for chips in allocators]
    used = {pool: max(chips.used[pool] for chips in allocators) for pool in NODES}
    cluster = Allocator(used).cluster()
    precision = draw(st.sampled_from([PRECISIONS["bf16"], PRECISIONS["fp16"]]))
    plans = tuple(
        Plan(
            model=refer_to_model(model),
            cluster=refer_to_cluster(cluster),
            job=Job(
                sequence_length=SEQUENCE_LENGTH,
                global_batch=line.sequences,
                precision=precision,
                schedule=kind,
            ),
            pipelines=(line,),
            synchronisation=draw(rules((line,), model.num_units)),
            tied_owner=0 if model.head.tied else None,
        )
        for line in lines
    )
    assert all(check_plan(plan) == [] for plan in plans)
    return *plans, model, cluster


@FEW
@given(pairs())
def test_what_moves_is_bounded_and_adds_up(case):
    old, new, model, cluster = case
    held, needed = (movement(p, p, model, cluster, moved={}) for p in (old, new))
    there, back = movement(old, new, model, cluster), movement(new, old, model, cluster)
    assert 0 <= there.total_bytes <= needed.total_bytes * (1 + 1e-9)
    assert there.from_checkpoint_bytes == 0  # nothing was lost
    assert sum(there.by_pool.values()) == pytest.approx(there.total_bytes)
    assert there.busiest_chip_bytes <= there.total_bytes * (1 + 1e-9)
    if tied_apart(old) or tied_apart(new):
        return  # a copy of a tied table always comes from its owner
    # What both plans have in common is the same both ways.
    assert needed.total_bytes - there.total_bytes == pytest.approx(
        held.total_bytes - back.total_bytes, abs=1e-3
    )
    assert movement(old, old, model, cluster).total_bytes == 0


@pytest.mark.slow
@FEW
@given(pairs())
def test_units_that_are_worked_out_once_move_as_one_by_one(case):
    old, new, model, cluster = case
    at_once = movement(old, new, model, cluster)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StateLayout, "signature", lambda layout, unit: (unit,))
        one_by_one = movement(old, new, model, cluster)
    assert at_once.total_bytes == pytest.approx(one_by_one.total_bytes)
    assert at_once.by_pool == pytest.approx(one_by_one.by_pool)


@FEW
@given(pairs(), st.data())
def test_lost_nodes_only_add(case, data):
    old, new, model, cluster = case
    everywhere = {(p.name, n): (p.name, n) for p in cluster.pools for n in range(p.nodes)}
    gone = data.draw(st.sets(st.sampled_from(sorted(everywhere))))
    kept = {place: where for place, where in everywhere.items() if place not in gone}
    whole = movement(old, new, model, cluster)
    less = movement(old, new, model, cluster, kept)
    assert less.total_bytes >= whole.total_bytes * (1 - 1e-9)
    assert 0 <= less.from_checkpoint_bytes <= less.total_bytes * (1 + 1e-9)


@FEW
@given(pairs())
def test_holders_and_shares_are_those_of_the_cost_model(case):
    """With everything lost, what comes is what the cost model counts on all chips."""
    plan, _, model, cluster = case
    ends = (0, model.head_unit)
    both = [stage for _, _, stage in plan.stages() if all(covers(stage.units, e) for e in ends)]
    assume(not (tied_apart(plan) and both))  # two tables on one chip that are one to the move
    elements, expected = RankElements(plan, model), 0.0
    for p, s, stage in plan.stages():
        for unit in (u for a, b in stage.units for u in range(a, b)):
            for kind in ParameterClass:
                held, trained, kept, copied, _ = elements.of((p, s), unit, kind)
                expected += 2 * (held - trained).sum() + 12 * (kept - copied).sum()
                expected += 4 * copied.sum()
    found = movement(plan, plan, model, cluster, moved={})
    assert found.total_bytes == pytest.approx(expected)
    assert found.from_checkpoint_bytes == pytest.approx(found.total_bytes)
