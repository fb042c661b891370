from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from tutti.cost.plan.sources import Sources
from tutti.document import Place
from tutti.errors import TuttiError
from tutti.hardware.cluster import Cluster
from tutti.hardware.profile import Profile
from tutti.plan.check import check_plan
from tutti.plan.job import PRECISIONS, ScheduleKind
from tutti.plan.plan import Order
from tutti.plan.uniform import Degrees, uniform_plan
from tutti.schedule.schedule import ScheduleMemo, build_schedule
from tutti.search.ask_from_values import Limits, make_problem
from tutti.search.candidate_loop import Search, proven_best
from tutti.search.improve import plan_search
from tutti.search.improve.plan_moves import Here
from tutti.search.improve.plan_search import MOVES, PlanSearch, _short_counts
from tutti.search.improve.stage_loads import Loads
from tutti.search.improve.stage_moves import degree_moves
from tutti.search.pricing.pipeline_recurrence import depths_for_messages
from tutti.search.pricing.simulate_draft import DraftSimulator
from tutti.search.pricing.unit_tables import Tables
from tutti.search.question.effort import Effort
from tutti.search.strategy.candidate import NARROWER
from tutti.search.strategy.space_limits import plan_in_space
from tutti.search.thresholds import THRESHOLDS
from tutti.simulate.estimate import estimate

CLUSTER = {
    "name": "two",
    "pools": [
        {"name": "new", "chip": "A100-80", "chips_per_node": 2},
        {"name": "old", "chip": "V100-32", "chips_per_node": 2},
    ],
    "fabric": {"links": [{"pools": ["new", "old"], "latency_s": 0.02, "bandwidth": 2e9}]},
}


def problem_of(limits=None, batch=16):
    cluster = Cluster.from_document(CLUSTER, Place("two"))
    return make_problem("llama-3.2-1b", cluster, sequence_length=1024, global_batch=batch,
                        limits=limits or Limits())  # fmt: skip


def searched(problem):
    search = Search(Tables(problem), Effort())
    best, _ = proven_best(search, search.run())
    return search, best


def local(search):
    return PlanSearch(search.simulator, search.seconds_worth)


def test_no_move_leads_on_from_where_it_ends():
    search, best = searched(problem_of())
    plan, found = local(search).improved(best.plan, best.estimate, 10**9)
    assert found.step_seconds <= best.step_seconds
    assert not check_plan(plan, search.problem.model, search.problem.cluster)
    assert plan_in_space(plan, search.problem)
    again, _ = local(search).improved(plan, found, 10**9)
    assert again == plan


def test_work_that_helped_is_given_back_once():
    search, best = searched(problem_of())
    budget, refundable = 60_000, 25_000
    frugal, patient = local(search), PlanSearch(search.simulator, search.seconds_worth, refundable)
    before = search.simulator.instructions
    _, less = frugal.improved(best.plan, best.estimate, budget)
    done = search.simulator.instructions - before
    _, more = patient.improved(best.plan, best.estimate, budget)
    longer = search.simulator.instructions - before - done
    assert less.step_seconds < best.step_seconds  # something helped
    assert 0 <= patient.refundable < refundable
    assert done < longer <= budget + refundable + 40_000
    assert more.step_seconds <= less.step_seconds


def test_a_kind_with_many_moves_does_not_hide_the_others(monkeypatch):
    search, best = searched(problem_of())
    made = {"many": ["many"] * 40, "few": ["few"] * 2}
    asked = []

    def never_better(self, plan, best, now):
        asked.append(plan)
        self.spent += 1

    moves = {kind: lambda here, plans=plans: iter(plans) for kind, plans in made.items()}
    monkeypatch.setattr(plan_search, "MOVES", moves)
    monkeypatch.setattr(PlanSearch, "_better", never_better)
    plan, _ = local(search).improved(best.plan, best.estimate, 10**9)
    turn = THRESHOLDS.first_moves
    assert asked[: turn + 2] == ["many"] * turn + ["few"] * 2
    assert (asked.count("many"), asked.count("few")) == (40, 2)
    assert plan.pipelines == best.plan.pipelines


def test_what_short_steps_find_nearly_as_good_is_simulated_whole_at_the_end(monkeypatch):
    search, best = searched(problem_of())
    start = plan_search._key(replace(best.plan, collectives=()))

    def never_short_of_one(self, plan, counts):
        return 1.0 if plan_search._key(plan) == start else 1.001  # all others look a little worse

    monkeypatch.setattr(plan_search, "_short_counts", lambda plan: ([1], [2]))
    monkeypatch.setattr(PlanSearch, "_short_worth", never_short_of_one)
    _, again = local(search).improved(best.plan, best.estimate, 10**9)
    assert again.step_seconds < best.step_seconds
    monkeypatch.setattr(PlanSearch, "_short_worth", lambda self, plan, counts: 1.0)
    far = replace(
        THRESHOLDS, nearly_as_good=1.0
    )  # as good is no better: nothing is looked at again
    monkeypatch.setattr(plan_search, "THRESHOLDS", far)
    _, none = local(search).improved(best.plan, best.estimate, 10**9)
    assert none.step_seconds == best.step_seconds


@pytest.mark.parametrize("chips", [64, 1024])
def test_work_grows_with_the_gap_up_to_a_limit(chips):
    effort = Effort()
    works = [effort.local_search(chips, 1.0 + gap, 1.0) for gap in (0.0, 0.02, 0.1, 0.2, 0.4, 2.0)]
    assert works == sorted(works)
    assert works[0] == 0
    widest = effort.large_widest if chips >= effort.large else effort.widest_more
    assert works[-1] == pytest.approx(widest * works[3], rel=1e-5)
    assert effort.local_search(chips, 9.0, 1.0) == works[-1]
    assert [effort.is_wide(1.0 + gap, 1.0) for gap in (0.1, 0.3)] == [False, True]
    assert not effort.is_wide(1.0, 0.0)  # no bound is known


def test_every_narrower_part_is_looked_at_where_the_gap_is_wide():
    problem = problem_of()
    search = Search(Tables(problem), replace(Effort(), candidates=1, most_candidates=1), bound=1e-3)
    offered = search.source.all()
    search.run()
    best = min(candidate.value for candidate in offered)
    for inside in NARROWER:
        near = [c for c in offered if inside(c.chains) and c.value < best]
        assert any(inside(c.chains) for c in search.looked_at) or not near
    close = Search(Tables(problem), replace(Effort(), candidates=1, most_candidates=1), bound=1e3)
    close.run()
    assert len(close.looked_at) < len(search.looked_at)


def test_short_steps_are_short_beside_a_pipeline_of_smaller_micro_batches():
    """Two copies of one cut whose micro-batches differ in size have nothing to keep apart."""
    _, best = searched(problem_of(batch=512))
    pipeline = best.plan.pipelines[0]
    stage = pipeline.stages[0]
    stages = (replace(stage, units=((0, 9),)), replace(stage, units=((9, 18),)))

    def copy(sequences, count):
        replicas = (replace(stage.replicas[0], count=1, sequences=sequences),)
        own = tuple(replace(s, replicas=replicas) for s in stages)
        return replace(pipeline, micro_batch=sequences, micro_batches=count, stages=own)

    def counts(*pipelines):
        job = replace(best.plan.job, schedule=ScheduleKind.ONE_F_ONE_B)
        return _short_counts(replace(best.plan, job=job, pipelines=pipelines))

    assert counts(copy(1, 300), copy(4, 50)) == ([5, 5], [7, 7])
    assert counts(copy(1, 300), copy(1, 290)) == ([15, 5], [17, 7])  # these end apart


def test_work_is_counted_and_the_answer_the_same_every_time():
    search, best = searched(problem_of())
    for budget in (0, 50_000):
        one, other = local(search), local(search)
        first = one.improved(best.plan, best.estimate, budget)
        assert one.spent <= budget + 40_000
        assert other.improved(best.plan, best.estimate, budget)[0] == first[0]


def pipelined(problem):
    """Return a plan of one pipeline over a slow link."""
    space = replace(
        problem.space, schedules=(ScheduleKind.ONE_F_ONE_B,), virtual=(1,), max_pipelines=1,
        idle=False, mixed_stages=False,
    )  # fmt: skip
    search, best = searched(replace(problem, space=space))
    assert len(best.plan.pipelines[0].stages) > 1, best.summary
    return search, best


def test_widths_of_all_stages_are_tried_before_those_of_one():
    problem = problem_of()
    plan = uniform_plan(problem.model, problem.cluster, problem.job, Degrees(pp=2, dp=2))
    stages = plan.pipelines[0].stages
    moves = [
        move.pipelines[0].stages
        for move in degree_moves(Here(problem=problem, plan=plan, loads=Loads({})))
    ]
    pairs = [list(zip(move, stages, strict=True)) for move in moves]
    changed = [sum(one.replicas != other.replicas for one, other in pair) for pair in pairs]
    assert changed == sorted(changed, reverse=True)
    assert set(changed) == {1, 2}


def test_a_slow_link_asks_for_deeper_warm_up():
    search, best = pipelined(problem_of(batch=32))
    simulator = DraftSimulator(search.tables)
    shallow = replace(
        best.plan,
        pipelines=tuple(
            replace(
                pipeline,
                stages=tuple(
                    replace(stage, order=replace(stage.order, warm_up=None))
                    for stage in pipeline.stages
                ),
            )
            for pipeline in best.plan.pipelines
        ),
    )
    start = simulator.price(shallow)
    plan, found = local(search).improved(shallow, start, 3_000_000)
    assert found.step_seconds < 0.95 * start.step_seconds
    depths = [stage.order.warm_up for _, _, stage in plan.stages()]
    assert plan.job.schedule is not ScheduleKind.ONE_F_ONE_B or any(depths)


@pytest.mark.parametrize(
    "limits",
    [Limits(tp_max=1, cp_max=1), Limits(shard=(0, 1)), Limits(offload=False, recompute=False),
     Limits(micro_batch=(2,)), Limits(idle=False), Limits(exportable="megatron")],
)  # fmt: skip
def test_the_space_is_kept(limits):
    search, best = searched(problem_of(limits))
    plan, _ = local(search).improved(best.plan, best.estimate, 400_000)
    assert plan_in_space(plan, search.problem)


def test_lists_from_the_memo_are_those_written_anew():
    search, best = searched(problem_of())
    memo = ScheduleMemo()
    here = Here(problem=search.problem, plan=best.plan, loads=Loads.of(best.estimate))
    compared = 0
    for kind in MOVES:
        for plan in itertools.islice(MOVES[kind](here), 12):
            if plan is None or check_plan(plan, search.problem.model, search.problem.cluster):
                continue
            try:
                anew = build_schedule(plan)
            except TuttiError:
                continue
            known = build_schedule(plan, memo)
            for one, other in zip(anew.classes, known.classes, strict=True):
                assert list(one.instructions) == list(other.instructions), kind
            compared += 1
    assert compared > 20


def test_prices_from_the_memo_are_those_made_anew():
    """Plans that differ from each other in every kind of move, one after the other."""
    search, best = searched(problem_of())
    problem, compared = search.problem, 0
    simulator = search.simulator
    here = Here(problem=problem, plan=best.plan, loads=Loads.of(best.estimate))
    for kind in MOVES:
        for plan in itertools.islice(MOVES[kind](here), 6):
            plan = None if plan is None else replace(plan, collectives=())
            if plan is None or check_plan(plan, problem.model, problem.cluster):
                continue
            try:
                anew = estimate(plan, problem.model, problem.cluster, problem.pinned_sources())
            except TuttiError:
                continue
            known = simulator.price(plan)
            assert known.step_seconds == anew.step_seconds, kind
            assert known.memory == anew.memory, kind
            assert known.priced.choices == anew.priced.choices, kind
            compared += 1
    assert compared > 20


def test_a_change_of_two_stages_leaves_the_lists_of_the_others():
    """What happens in the last stages is the same when the first two share units otherwise."""
    _, best = pipelined(problem_of(batch=32))
    pipeline = best.plan.pipelines[0]
    stage = pipeline.stages[0]

    def cut(*ends):
        bounds = itertools.pairwise((0, *ends, 18))
        stages = tuple(
            replace(stage, units=(span,), order=Order(warm_up=depth))
            for depth, span in zip((4, 3, 2, 1), bounds, strict=True)
        )
        return replace(best.plan, pipelines=(replace(pipeline, stages=stages),))

    memo = ScheduleMemo()
    one, other = (build_schedule(cut(*ends), memo) for ends in ((5, 9, 14), (4, 9, 14)))
    pairs = zip(one.classes, other.classes, strict=True)
    alike = [a.instructions is b.instructions for a, b in pairs]
    replicas = len(stage.replicas)
    assert alike == [False] * 2 * replicas + [True] * 2 * replicas


def test_strategies_run_ahead_by_the_time_that_messages_take():
    _, best = pipelined(problem_of(batch=32))
    usual = len(best.plan.pipelines[0].stages)
    assert (best.plan.pipelines[0].stages[0].order.warm_up or usual) > usual


def test_depths_for_messages():
    usual = np.array([3, 2, 1])
    even, none = np.ones(3), np.zeros(3)
    assert depths_for_messages(usual, even, none).tolist() == [3, 2, 1]
    assert depths_for_messages(usual, np.array([1.0, 0.2, 0.2]), none).tolist() == [3, 2, 1]
    assert depths_for_messages(usual, even, np.array([0.0, 1.0, 0.0])).tolist() == [5, 4, 1]
    slow = np.array([4.0, 0.0, 0.0])  # the link itself is the slowest: two ways of it and a bit
    assert depths_for_messages(usual, even, slow).tolist() == [3, 2, 1]
    # The first stage is fast and asks for no more depth, but stays ahead of the next one.
    fast = np.array([0.1, 1.0, 1.0, 1.0, 1.0])
    deeper = depths_for_messages(np.arange(5, 0, -1), fast, np.full(5, 0.05))
    assert deeper.tolist() == [6, 5, 3, 2, 1]


MIXED = {
    "name": "mixed",
    "pools": [
        {"name": "new", "chip": "H100", "chips_per_node": 1},
        {"name": "old", "chip": "A100-80", "chips_per_node": 4},
    ],
}


def test_a_job_in_8_bits_uses_chips_that_have_none():
    """The blocks on them stay wide, wherever the local search moves them."""
    cluster = Cluster.from_document(MIXED, Place("mixed"))
    problem = make_problem(
        "llama-3.2-3b", cluster, sequence_length=4096, global_batch=32, precision="fp8"
    )
    search, best = searched(problem)
    plan, found = local(search).improved(best.plan, best.estimate, 2_000_000)
    wide = {unit for start, stop in plan.job.wide_units for unit in range(start, stop)}
    held = {
        unit
        for _, _, stage in plan.stages()
        if "old" in stage.chips.pools
        for start, stop in stage.units
        for unit in range(start, stop)
    }
    blocks = range(1, problem.model.head_unit)
    assert held, "both pools take part"
    assert held.intersection(blocks) <= wide
    assert wide < set(blocks), "the others multiply in 8 bits"
    _, in_bf16 = searched(replace(problem, job=replace(problem.job, precision=PRECISIONS["bf16"])))
    assert found.step_seconds < in_bf16.step_seconds


def test_small_products_stay_wide_where_that_is_faster():
    """Rounding operands costs more than products of so few tokens gain."""
    pools = [{"name": "new", "chip": "H200", "chips_per_node": 1}]
    problem = make_problem(
        "gpt2", Cluster.from_document({"name": "one", "pools": pools}, Place("one")),
        sequence_length=128, global_batch=4, precision="fp8",
        sources=Sources(profiles=(Profile.find("h200"),)),
    )  # fmt: skip
    search, best = searched(problem)
    narrow = replace(best.plan, job=replace(best.plan.job, wide_units=()))
    before = search.simulator.price(narrow)
    plan, found = local(search).improved(narrow, before, 500_000)
    assert plan.job.wide_units == ((1, problem.model.head_unit),)
    assert found.step_seconds < before.step_seconds
