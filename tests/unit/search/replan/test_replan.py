"""Re-planning: what is left of a running plan, what moves, when a move pays back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tiny import write_cluster, write_model
from tutti.errors import InputError
from tutti.hardware.cluster import Cluster
from tutti.hardware.topology import Position
from tutti.models.load import load_model
from tutti.plan.check import check_plan
from tutti.plan.chips import ChipSet
from tutti.plan.files import refer_to_cluster, refer_to_model
from tutti.plan.job import Job, ScheduleKind
from tutti.plan.plan import ExpertGroup, Pipeline, Plan, Replica, Stage
from tutti.search.question.effort import Effort
from tutti.search.question.space import Problem, Space
from tutti.search.question.what_if import change_cluster
from tutti.search.replan.replan import _seeds, replan
from tutti.search.replan.surviving_plan import surviving_plan

LLAMA = load_model("llama-3.2-1b")
MIXED = Cluster.load("small-mixed")
NARROW = Space(
    tp=(1,), cp=(1,), schedules=(ScheduleKind.ONE_F_ONE_B,), shard=(0,), max_stages=2,
    recompute=("none",), offload=(), sequences=(1, 2),
)  # fmt: skip


def stage(units: tuple[int, int], *replicas: Replica, **rest: object) -> Stage:
    return Stage(units=(units,), replicas=replicas, **rest)  # type: ignore[arg-type]


def replicas(chips: str, count: int, sequences: int = 1, **rest: int) -> Replica:
    return Replica(chips=ChipSet.of(chips), count=count, sequences=sequences, **rest)


def llama_plan(*pipelines: Pipeline, cluster: Cluster = MIXED, model=LLAMA) -> Plan:
    batch = sum(pipeline.sequences for pipeline in pipelines)
    plan = Plan(
        model=refer_to_model(model),
        cluster=refer_to_cluster(cluster),
        job=Job(sequence_length=1024, global_batch=batch),
        pipelines=pipelines,
        tied_owner=0 if model.ties_weights and len(pipelines[0].stages) > 1 else None,
    )
    assert check_plan(plan, model, cluster) == []
    return plan


def two_stages(micro_batches: int = 6, tp: int = 1) -> Plan:
    """16 copies on A100 hand to 8 on H100 that take twice as much."""
    first = stage((0, 9), replicas("a100/0-1/0-7", 16 // tp, tp=tp))
    second = stage((9, 18), replicas("h100/0/0-7", 8 // tp, 2, tp=tp))
    pipeline = Pipeline(micro_batch=16 // tp, micro_batches=micro_batches, stages=(first, second))
    return llama_plan(pipeline)


# --- what is left ----------------------------------------------------------------------------


def test_a_plan_that_lost_nothing_is_only_renumbered():
    plan = llama_plan(
        Pipeline(
            micro_batch=8, micro_batches=2, stages=(stage((0, 18), replicas("a100/1/0-7", 8)),)
        )
    )
    change = change_cluster(MIXED, "-node a100/0")
    left = surviving_plan(plan, LLAMA, change.cluster, change.moved)
    assert left is not None
    assert str(left.pipelines[0].stages[0].chips) == "a100/0/0-7"
    assert len(left.idle) == 16
    assert left.cluster.hash == change.cluster.fingerprint()
    assert replace(left.pipelines[0].stages[0].replicas[0], chips=ChipSet()) == replace(
        plan.pipelines[0].stages[0].replicas[0], chips=ChipSet()
    )


def test_lost_copies_are_dropped_in_all_stages_and_the_batch_stays():
    plan = two_stages()
    change = change_cluster(MIXED, "-node a100/0")
    left = surviving_plan(plan, LLAMA, change.cluster, change.moved)
    assert left is not None
    assert check_plan(left, LLAMA, change.cluster) == []
    (pipeline,) = left.pipelines
    assert (pipeline.micro_batch, pipeline.micro_batches) == (8, 12)
    assert [s.num_replicas for s in pipeline.stages] == [8, 4]
    assert left.job.global_batch == plan.job.global_batch


def test_a_lost_copy_moves_to_free_chips_of_its_pool():
    plan = llama_plan(
        Pipeline(
            micro_batch=4, micro_batches=2, stages=(stage((0, 18), replicas("a100/0/0-3", 4)),)
        )
    )
    change = change_cluster(MIXED, "-node a100/0")
    left = surviving_plan(plan, LLAMA, change.cluster, change.moved)
    assert left is not None
    assert left.pipelines[0].stages[0].num_replicas == 4
    assert str(left.pipelines[0].stages[0].chips) == "a100/0/0-3"


def test_a_pipeline_that_is_gone_leaves_its_share_to_the_others():
    plan = llama_plan(
        Pipeline(
            micro_batch=8, micro_batches=6, stages=(stage((0, 18), replicas("h100/0/0-7", 8)),)
        ),
        Pipeline(
            micro_batch=8, micro_batches=2, stages=(stage((0, 18), replicas("p800/0/0-7", 8)),)
        ),
    )
    change = change_cluster(MIXED, "-pool p800")
    left = surviving_plan(plan, LLAMA, change.cluster, change.moved)
    assert left is not None
    assert [(p.micro_batch, p.micro_batches) for p in left.pipelines] == [(8, 8)]


def test_nothing_is_left_of_a_plan_whose_stage_is_gone():
    change = change_cluster(MIXED, "-pool h100")
    assert surviving_plan(two_stages(), LLAMA, change.cluster, change.moved) is None


def test_a_batch_that_what_is_left_does_not_make_up_is_dealt_out_anew():
    """One copy of four sequences is left of a stage; nine sequences pass by threes."""
    plan = llama_plan(
        Pipeline(
            micro_batch=9,
            micro_batches=1,
            stages=(stage((0, 18), replicas("h100/0/0", 1, 5), replicas("p800/0/0", 1, 4)),),
        )
    )
    change = change_cluster(MIXED, "-pool h100")
    left = surviving_plan(plan, LLAMA, change.cluster, change.moved)
    assert left is not None
    (pipeline,) = left.pipelines
    assert (pipeline.micro_batch, pipeline.micro_batches) == (3, 3)
    assert [r.sequences for r in pipeline.stages[0].replicas] == [3]


@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=6),
    st.integers(1, 4),
    st.booleans(),
    st.data(),
)
def test_whichever_copy_is_lost_the_others_go_on(
    sequences: list[int], micro_batches: int, second: bool, data: st.DataObject
):
    """Copies of any sizes, one or two stages, one of several copies lost: the batch stays whole."""
    copies = [replicas(f"h100/0/{i}", 1, n) for i, n in enumerate(sequences)]
    stages = [stage((0, 18), *copies)]
    if second:
        far = replicas("p800/0/0", 1, sum(sequences))
        stages = [stage((0, 9), *copies), stage((9, 18), far)]
    pipeline = Pipeline(
        micro_batch=sum(sequences), micro_batches=micro_batches, stages=tuple(stages)
    )
    plan = llama_plan(pipeline)
    gone = data.draw(st.sets(st.integers(0, len(sequences) - 1), max_size=len(sequences) - 1))
    lost = frozenset(Position("h100", 0, slot) for slot in gone)
    # a lost copy may move to free chips of its pool: there are none
    spare = frozenset(Position("h100", 0, slot) for slot in range(len(sequences), 8))
    left = surviving_plan(plan, LLAMA, MIXED, lost=lost | spare)
    assert left is not None
    assert check_plan(left, LLAMA, MIXED) == []
    (kept,) = left.pipelines
    assert kept.micro_batch * kept.micro_batches == plan.job.global_batch
    for each in kept.stages:
        assert sum(r.sequences * r.count for r in each.replicas) == kept.micro_batch
        assert not lost & set(each.chips)
        for replica in each.replicas:
            for chip in replica.chips:
                own = sequences[chip.slot] if chip.pool == "h100" else sum(sequences)
                assert replica.sequences <= own


def test_expert_groups_are_counted_again():
    model = load_model("mixtral-8x7b")
    whole = stage(
        (0, model.num_units), replicas("a100/0-1/0-7", 16), experts=(ExpertGroup(chips=8, count=2),)
    )
    plan = llama_plan(Pipeline(micro_batch=16, micro_batches=2, stages=(whole,)), model=model)
    change = change_cluster(MIXED, "-node a100/1")
    left = surviving_plan(plan, model, change.cluster, change.moved)
    assert left is not None
    assert left.pipelines[0].stages[0].experts == (ExpertGroup(chips=8, count=1),)


def test_without_moves_nodes_stay_where_they_are():
    smaller = change_cluster(MIXED, "-1 nodes a100").cluster
    left = surviving_plan(two_stages(), LLAMA, smaller)
    assert left is not None
    assert str(left.pipelines[0].stages[0].chips) == "a100/0/0-7"


# --- what to do ------------------------------------------------------------------------------


@pytest.fixture
def problem(tmp_path) -> Problem:
    return Problem(
        model=load_model(str(write_model(tmp_path / "tiny"))),
        cluster=Cluster.load(write_cluster(tmp_path / "pair.yaml")),
        job=Job(sequence_length=512, global_batch=16),
        space=NARROW,
    )


def running(problem: Problem, chips: str, count: int, sequences: int = 1) -> Plan:
    whole = stage((0, problem.model.num_units), replicas(chips, count, sequences))
    size = count * sequences
    return Plan(
        model=refer_to_model(problem.model),
        cluster=refer_to_cluster(problem.cluster),
        job=problem.job,
        pipelines=(Pipeline(micro_batch=size, micro_batches=16 // size, stages=(whole,)),),
    )


def test_a_lost_node_is_answered_with_a_plan_and_a_price(problem):
    old = running(problem, "new/0-1/0-1", 4)
    change = change_cluster(problem.cluster, "-node new/0")
    changed = replace(problem, cluster=change.cluster)
    found = replan(old, changed, moved=change.moved)
    best = found.result.best
    assert check_plan(best.plan, problem.model, change.cluster) == []
    assert found.staying is not None
    assert best.step_seconds <= found.staying.step_seconds
    assert found.result.lower_bound_seconds <= best.step_seconds
    assert found.result.uniform is None
    assert found.movement.from_checkpoint_bytes == 0
    document = found.to_document()
    assert document["moved_bytes"] == found.movement.total_bytes
    assert document["payback_s"] == found.payback_seconds


def test_a_plan_that_cannot_go_on_pays_at_once(problem):
    old = running(problem, "new/0/0-1", 2)
    change = change_cluster(problem.cluster, "-pool new")
    found = replan(old, replace(problem, cluster=change.cluster), moved=change.moved)
    assert found.staying is None
    assert found.payback_seconds == 0.0
    assert found.movement.rolls_back
    assert "cannot go on" in found.words
    assert "checkpoint" in found.words


def test_the_old_plan_goes_on_where_nothing_is_faster(problem):
    first = replan(running(problem, "new/0-1/0-1", 4), problem)
    again = replan(first.result.best.plan, problem)
    assert again.kept_old
    assert again.movement.total_bytes == 0
    assert again.payback_seconds == 0.0
    assert "Nothing moves" in again.words


def test_the_old_plan_is_the_answer_where_a_search_finds_none(problem, monkeypatch):
    def nothing(*_: object, **__: object) -> None:
        raise InputError("no plan fits")

    monkeypatch.setattr("tutti.search.replan.replan.plan", nothing)
    old = running(problem, "new/0-1/0-1", 4)
    found = replan(old, problem, effort=Effort())
    assert found.kept_old
    assert found.result.best.plan.pipelines == old.pipelines
    assert found.result.gap_pct >= 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"global_batch": 32}, "global_batch 16, this 32"),
        ({"sequence_length": 256}, "sequence_length 512, this 256"),
    ],
)
def test_another_job_cannot_be_compared(problem, change, said):
    old = running(problem, "new/0-1/0-1", 4)
    with pytest.raises(InputError, match=said):
        replan(old, replace(problem, job=replace(problem.job, **change)))


def test_another_model_cannot_be_compared(problem):
    old = running(problem, "new/0-1/0-1", 4)
    with pytest.raises(InputError, match="give the same model"):
        replan(old, replace(problem, model=LLAMA))


# --- the running strategy on what is left ------------------------------------------------------


def own_pipelines() -> Plan:
    """Each pool by itself: 16 copies of 2 × 16 sequences, 8 of 4 × 8."""
    return llama_plan(
        Pipeline(
            micro_batch=256, micro_batches=2,
            stages=(stage((0, 18), replicas("a100/0-1/0-7", 16, 16)),),
        ),
        Pipeline(
            micro_batch=64, micro_batches=4,
            stages=(stage((0, 18), replicas("h100/0/0-7", 8, 8)),),
        ),
    )  # fmt: skip


def test_every_pipeline_of_the_running_plan_is_a_start():
    old = own_pipelines()
    change = change_cluster(MIXED, "-node a100/0")
    (seed,) = _seeds(old, Problem(model=LLAMA, cluster=change.cluster, job=old.job))
    assert [(p.chain.configs[0].pool, p.copies, p.micro_batches) for p in seed] == [
        ("a100", 8, 2),
        ("h100", 8, 4),
    ]
    (grown,) = _seeds(old, Problem(model=LLAMA, cluster=MIXED, job=old.job))
    assert [p.copies for p in grown] == [16, 8]


def test_a_pool_that_is_gone_is_no_part_of_the_start():
    old = own_pipelines()
    fewer = change_cluster(MIXED, "-node h100/0").cluster
    (seed,) = _seeds(old, Problem(model=LLAMA, cluster=fewer, job=old.job))
    assert [(p.chain.configs[0].pool, p.copies) for p in seed] == [("a100", 16)]


@pytest.mark.slow  # test_micro_batch_sizes takes a node away, too
def test_losing_chips_costs_no_more_than_what_they_did():
    old = own_pipelines()
    change = change_cluster(MIXED, "-node a100/0")
    problem = Problem(model=LLAMA, cluster=change.cluster, job=old.job)
    found = replan(old, problem, moved=change.moved)
    before = replan(old, replace(problem, cluster=MIXED))
    assert found.result.best.step_seconds < 2.0 * before.result.best.step_seconds
    assert check_plan(found.result.best.plan, LLAMA, change.cluster) == []


@pytest.mark.parametrize(
    "narrower",
    [Space(shard=(1,)), Space(sequences=(4, 8)), Space(max_stages=1, sequences=(1, 2))],
)
def test_a_start_outside_of_the_space_is_none(narrower):
    old = own_pipelines()
    problem = Problem(model=LLAMA, cluster=MIXED, job=old.job)
    assert _seeds(old, problem)
    assert _seeds(old, replace(problem, space=narrower)) == ()


def test_a_start_keeps_to_narrower_degrees():
    old = two_stages(tp=2)
    problem = Problem(model=LLAMA, cluster=MIXED, job=old.job)
    assert _seeds(old, problem)
    assert not _seeds(old, replace(problem, space=Space(tp=(1,))))
    assert not _seeds(old, replace(problem, space=Space(max_stages=1)))
    assert not _seeds(old, replace(problem, space=Space(schedules=(ScheduleKind.INTERLEAVED,))))
