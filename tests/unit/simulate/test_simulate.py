"""The simulator against a naive one, and what must hold for any plan and any costs."""

from __future__ import annotations

import dataclasses
import itertools
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.lines import uniform
from tests.support.plans import plans, small_model
from tests.support.step_bounds import lower_bound
from tests.unit.simulate.reference import naive, random_costs, waits
from tutti.errors import InputError, TuttiError
from tutti.hardware.cluster import Cluster
from tutti.plan.job import Job, ScheduleKind
from tutti.plan.uniform import Degrees, uniform_plan
from tutti.schedule.instruction import Op
from tutti.schedule.schedule import Schedule, build_schedule
from tutti.simulate import ClassCosts, SimulationResult, StepCosts, perturb, repeat, simulate
from tutti.simulate.kernel import has_numba
from tutti.simulate.program import Track
from tutti.simulate.result import union_seconds

seeds = st.integers(0, 2**31)


@given(plans(), seeds)
def test_what_holds_for_any_plan_and_any_costs(plan, seed):
    """One test, since drawing a plan takes longer than simulating it."""
    schedule = build_schedule(plan)
    costs = random_costs(schedule, seed)
    result = simulate(schedule, costs)
    equals_the_naive_simulator(result, schedule, costs)
    starts_when_what_it_waits_for_has_ended(result, schedule)
    accounts_for_every_second_of_every_lane(result)
    has_a_critical_path_that_lasts_the_step(result)
    gives_all_memory_back(result)
    jitters_by_seed_alone(result, seed)
    bound = lower_bound(schedule, costs)
    assert bound.seconds <= result.step_seconds * (1 + 1e-12)
    if has_numba():
        gives_the_same_bits(
            simulate(schedule, costs, backend="python"), simulate(schedule, costs, backend="numba")
        )


def equals_the_naive_simulator(
    result: SimulationResult, schedule: Schedule, costs: StepCosts
) -> None:
    expected = naive(schedule, costs)
    for index, rank_class in enumerate(schedule.classes):
        start, end = result.timeline(index)
        for i in range(len(rank_class.instructions)):
            assert (start[i], end[i]) == expected[index, i]


def starts_when_what_it_waits_for_has_ended(result: SimulationResult, schedule: Schedule) -> None:
    program = result.program
    needs, together = waits(schedule)
    for index in range(program.size):
        place = program.place(index)
        wanted = [need for member in together[place] for need in needs[member]]
        ends = [result.end[program.offsets[c] + i] for c, i in wanted]
        assert result.start[index] == max(ends, default=0.0)
        by = int(result.binding[index])
        assert (by < 0 and result.start[index] == 0.0) or result.end[by] == result.start[index]


def accounts_for_every_second_of_every_lane(result: SimulationResult) -> None:
    step = result.step_seconds
    for found in result.classes:
        assert sum(found.compute.values()) + sum(found.idle.values()) == pytest.approx(step)
        assert all(seconds >= 0 for seconds in found.idle.values())
        for track in Track:
            busy, idle = found.busy_seconds[track], found.idle_seconds[track]
            assert busy + idle == pytest.approx(step)
            assert -1e-9 <= busy <= step * (1 + 1e-12)


def has_a_critical_path_that_lasts_the_step(result: SimulationResult) -> None:
    path = result.critical_path
    assert path[0].start == 0.0
    assert path[-1].end == result.step_seconds
    for before, entry in itertools.pairwise(path):
        assert entry.start == before.end
    assert sum(result.critical_seconds.values()) == pytest.approx(result.step_seconds)


def gives_all_memory_back(result: SimulationResult) -> None:
    for index, given_costs in enumerate(result.costs.classes):
        curve = result.memory(index)
        assert curve.least_bytes >= given_costs.static_bytes
        assert curve.final_bytes == pytest.approx(given_costs.static_bytes)
        assert (np.diff(curve.times) >= 0).all()
        points = curve.envelope(result.step_seconds, 37)
        assert points.max() == pytest.approx(curve.peak_bytes)
    assert result.warnings() == []


def jitters_by_seed_alone(result: SimulationResult, seed: int) -> None:
    program, costs = result.program, result.costs
    once, again, other = (
        simulate(program, perturb(program.schedule, costs, seed=s, sigma=0.1))
        for s in (seed, seed, seed + 1)
    )
    gives_the_same_bits(once, again)
    assert not np.array_equal(once.end, other.end)
    gives_the_same_bits(result, simulate(program, perturb(program.schedule, costs)))


def gives_the_same_bits(one: SimulationResult, other: SimulationResult) -> None:
    for name in ("start", "end", "binding", "idle"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name


def test_memory_counts_what_a_zero_length_instruction_holds():
    schedule = build_schedule(uniform(1, 1, ScheduleKind.ONE_F_ONE_B))
    size = len(schedule.classes[0].instructions)
    costs = ClassCosts(
        seconds=np.zeros(size), allocate_bytes=np.ones(size), free_bytes=np.ones(size)
    )
    curve = simulate(schedule, StepCosts(classes=(costs,))).memory(0)
    assert (curve.least_bytes, curve.peak_bytes, curve.final_bytes) == (0.0, 1.0, 0.0)


def test_too_much_memory_and_lost_memory_are_said():
    schedule = build_schedule(uniform(1, 1, ScheduleKind.ONE_F_ONE_B))
    size = len(schedule.classes[0].instructions)
    taken = np.zeros(size)
    taken[0] = 2.0**40
    costs = ClassCosts(seconds=np.ones(size), allocate_bytes=taken, free_bytes=np.zeros(size))
    first, second = simulate(schedule, StepCosts(classes=(costs,))).warnings()
    assert first == "stage 0: needs 1.0 TiB of 80.0 GiB per chip"
    assert second == "stage 0: 1.0 TiB are still in use when the step is over"


def test_union_of_overlapping_intervals():
    start, end = np.array([0.0, 5.0, 1.0, 1.5]), np.array([2.0, 6.0, 3.0, 1.75])
    assert union_seconds(start, end) == 4.0
    assert union_seconds(np.zeros(0), np.zeros(0)) == 0.0


# --- idle time and its reasons ---------------------------------------------------------------


def costs_by_op(schedule: Schedule, seconds: dict[Op, float]) -> StepCosts:
    return StepCosts(
        classes=tuple(
            ClassCosts.plain(np.array([seconds.get(e.op, 0.0) for e in c.instructions]))
            for c in schedule.classes
        )
    )


def test_a_slow_wire_shows_as_exposed_communication_and_the_rest_as_bubble():
    schedule = build_schedule(uniform(2, 1, ScheduleKind.ONE_F_ONE_B))
    costs = costs_by_op(
        schedule,
        {Op.FORWARD: 1.0, Op.BACKWARD_INPUT: 2.0, Op.BACKWARD_WEIGHT: 4.0, Op.SEND: 10.0},
    )
    result = simulate(schedule, costs)
    lower, upper = result.classes
    # F 1, send 10, F 1, Bi 2, send 10, Bi 2, Bw 4
    assert result.step_seconds == 30.0
    assert lower.exposed_communication_seconds == 20.0
    assert lower.bubble_seconds == 3.0
    # the tail behind the upper stage's weights: 6 s of the wire, then the lower stage's passes
    assert upper.exposed_communication_seconds == 16.0
    assert upper.bubble_seconds == 7.0
    assert result.critical_seconds["Send"] == 20.0


def test_a_slow_copy_shows_as_exposed_copy():
    schedule = build_schedule(uniform(1, 2, ScheduleKind.ONE_F_ONE_B))
    found = simulate(schedule, costs_by_op(schedule, {Op.FETCH: 5.0, Op.FORWARD: 1.0})).classes[0]
    assert found.idle == {"exposed communication": 0.0, "exposed copies": 10.0, "bubble": 0.0}


def test_a_breakdown_splits_compute_by_code_or_by_seconds():
    schedule = build_schedule(uniform(1, 2, ScheduleKind.ONE_F_ONE_B))
    costs = costs_by_op(schedule, {Op.FORWARD: 1.0, Op.STEP: 3.0, Op.FETCH: 0.5})
    entries = schedule.classes[0].instructions
    codes = np.array([1 if e.op is Op.STEP else 0 for e in entries])
    matrix = np.zeros((len(entries), 2))
    matrix[np.arange(len(entries)), codes] = costs.classes[0].seconds
    for breakdown in (codes, matrix):
        own = dataclasses.replace(costs.classes[0], breakdown=breakdown)
        split = StepCosts(classes=(own,), categories=("matrix products", "update"))
        steps = sum(e.op is Op.STEP for e in entries)
        found = simulate(schedule, split).classes[0].compute
        assert found == {"matrix products": 2.0, "update": 3.0 * steps}


# --- perturbation ----------------------------------------------------------------------------


def test_a_slow_pool_slows_its_passes_only():
    schedule = build_schedule(uniform(2, 4, ScheduleKind.ONE_F_ONE_B))
    costs = costs_by_op(schedule, dict.fromkeys(Op, 1.0))
    slow = perturb(schedule, costs, slow={"fast": 2.0})
    for index, rank_class in enumerate(schedule.classes):
        for entry, seconds in zip(
            rank_class.instructions, slow.classes[index].seconds, strict=True
        ):
            assert seconds == (2.0 if entry.lane == "compute" else 1.0)
    one = perturb(schedule, costs, slow={"stage 1": 3.0})
    assert one.classes[0].seconds.max() == 1.0
    assert one.classes[1].seconds.max() == 3.0
    with pytest.raises(InputError, match="no pool or class 'fats'; did you mean 'fast'"):
        perturb(schedule, costs, slow={"fats": 2.0})
    with pytest.raises(InputError, match=r"give a factor such as 1\.2"):
        perturb(schedule, costs, slow={"fast": 0.0})
    with pytest.raises(InputError, match="jitter is -1"):
        perturb(schedule, costs, sigma=-1)


def test_repeated_runs_are_summed_up():
    schedule = build_schedule(uniform(3, 8, ScheduleKind.ONE_F_ONE_B))
    costs = costs_by_op(schedule, {Op.FORWARD: 1.0, Op.BACKWARD_INPUT: 1.0})
    spread = repeat(schedule, costs, runs=30, sigma=0.2)
    plain = simulate(schedule, costs).step_seconds
    assert spread == repeat(schedule, costs, runs=30, sigma=0.2)
    assert plain < spread.mean < spread.percentile(95) <= max(spread.seconds) < 2 * plain
    assert spread.to_document()["runs"] == 30
    assert repeat(schedule, costs, runs=2).seconds == (plain, plain)


# --- what is refused -------------------------------------------------------------------------


def test_costs_that_do_not_fit_are_refused():
    schedule = build_schedule(uniform(2, 2, ScheduleKind.ONE_F_ONE_B))
    costs = costs_by_op(schedule, {})
    with pytest.raises(ValueError, match="costs of 1 classes for a schedule of 2"):
        simulate(schedule, StepCosts(classes=costs.classes[:1]))
    short = ClassCosts.plain(np.zeros(3))
    with pytest.raises(ValueError, match="stage 0, replica 0: 3 costs for"):
        simulate(schedule, StepCosts(classes=(short, short)))
    with pytest.raises(ValueError, match="negative or not finite"):
        ClassCosts.plain(np.array([np.nan]))
    with pytest.raises(ValueError, match="expected float64"):
        ClassCosts(seconds=np.ones(2), allocate_bytes=np.ones(3), free_bytes=np.ones(2))
    size = len(schedule.classes[0].instructions)
    coded = dataclasses.replace(costs.classes[0], breakdown=np.full(size, 7))
    with pytest.raises(ValueError, match="'breakdown' does not fit the 2 categories"):
        simulate(schedule, StepCosts(classes=(coded, costs.classes[1]), categories=("a", "b")))


@pytest.mark.parametrize("backend", ["python", "auto"])
def test_lists_that_wait_for_ever_are_named(backend):
    schedule = build_schedule(uniform(2, 1, ScheduleKind.ONE_F_ONE_B))
    first, second = schedule.classes
    silent = tuple(
        entry._replace(op=Op.RECEIVE) if entry.op is Op.SEND else entry
        for entry in first.instructions
    )
    broken = dataclasses.replace(
        schedule, classes=(dataclasses.replace(first, instructions=silent), second)
    )
    costs = costs_by_op(broken, {})
    with pytest.raises(
        TuttiError, match=r"deadlock: pipeline 0, stage \d, replica 0 waits for ever"
    ):
        simulate(broken, costs, backend=backend)


# --- size ------------------------------------------------------------------------------------


def test_64_stages_of_512_micro_batches_take_well_under_a_second():
    schedule = build_schedule(uniform(64, 512, ScheduleKind.ONE_F_ONE_B))
    costs = costs_by_op(schedule, {Op.FORWARD: 1.0, Op.BACKWARD_INPUT: 1.0, Op.SEND: 0.1})
    simulate(schedule, costs)  # compiles
    before = time.process_time()
    result = simulate(schedule, costs)
    assert result.program.size > 250_000
    assert time.process_time() - before < 5, "ten times what an idle core needs"


def test_16384_chips_take_seconds_with_their_schedule():
    model = small_model(128, heads=8)
    job = Job(sequence_length=64, global_batch=16384)
    degrees = Degrees.parse("shard=1,recompute=full,tp=4,pp=64,sp=1")
    plan = uniform_plan(model, Cluster.load("H16384"), job, degrees)
    before = time.process_time()
    schedule = build_schedule(plan)
    result = simulate(schedule, costs_by_op(schedule, {Op.FORWARD: 1.0, Op.STEP: 1.0}))
    assert len(result.classes) == 64
    assert time.process_time() - before < 25, "ten times what an idle core needs"
