"""Estimates of plans: parts that sum, bounds that hold, and the vectorised price beside them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from tests.support.closed_forms import one_f_one_b_seconds
from tests.support.lines import uniform
from tests.support.plans import plans
from tests.support.step_bounds import lower_bound
from tutti.cost.arrays import Machine, Shape, Strategy
from tutti.cost.memory.rank_state import workload_of
from tutti.cost.plan.pool_prices import PoolPrices
from tutti.cost.plan.sources import Sources
from tutti.cost.step import price
from tutti.hardware.cluster import Cluster
from tutti.models.load import load_model
from tutti.plan.check import embedded_cluster, embedded_model
from tutti.plan.job import Job, ScheduleKind
from tutti.plan.plan import ContextKind
from tutti.plan.uniform import Degrees, uniform_plan
from tutti.schedule.instruction import Op
from tutti.simulate.estimate import estimate, with_forward_before

FEW = settings(max_examples=max(10, settings.default.max_examples // 5))


@FEW
@given(plans())
def test_every_plan_has_an_estimate_whose_parts_sum(plan):
    found = estimate(plan)
    assert found.step_seconds > 0
    assert sum(found.parts.values()) == pytest.approx(found.step_seconds, rel=1e-9)
    assert lower_bound(found.schedule, found.priced.costs).seconds <= (
        found.result.step_seconds * (1 + 1e-9)
    )
    for memory in found.memory:
        assert memory.moving >= -1e-3
        assert memory.total > 0
    assert 0 < found.mfu <= found.hfu < 1


@FEW
@given(plans())
def test_a_forward_pass_before_the_step_is_priced(plan):
    found = estimate(plan)
    more = with_forward_before(found, embedded_model(plan), embedded_cluster(plan))
    before = more.parts["forward pass before"]
    assert sum(more.parts.values()) == pytest.approx(more.step_seconds, rel=1e-9)
    assert 0 < before < found.step_seconds
    assert more.mfu * more.step_seconds == pytest.approx(found.mfu * found.step_seconds)


def test_on_one_chip_it_takes_what_the_forward_passes_of_the_step_take():
    spec, cluster, plan = a100_job(1, 4)
    found = estimate(plan)
    (forward,) = found.priced.costs.classes
    (entries,) = (c.instructions for c in found.schedule.classes)
    passes = sum(
        seconds for entry, seconds in zip(entries, forward.seconds, strict=True)
        if entry.op is Op.FORWARD
    )  # fmt: skip
    more = with_forward_before(found, spec, cluster)
    assert more.parts["forward pass before"] == pytest.approx(passes, rel=0.02)


def a100_job(stages: int, micro_batches: int, **degrees):
    model, cluster = load_model("llama-2-7b"), Cluster.load("S16")
    job = Job(sequence_length=2048, global_batch=micro_batches)
    plan = uniform_plan(model, cluster, job, Degrees(pp=stages, dp=1, **degrees))
    return model, cluster, plan


def prices_of(model, cluster, plan):
    pool = cluster.pool("a800")
    return PoolPrices(plan, model, cluster, pool, Sources().calibration(pool))


def unit_times(model, cluster, plan, unit):
    stage = plan.pipelines[0].stages[0]
    prices = prices_of(model, cluster, plan)
    return prices.unit(workload_of(plan, stage, stage.replicas[0]), unit, "none")


def test_one_chip_takes_what_the_vectorised_price_says():
    """The same formulas: a plan on one chip, priced both ways."""
    model, cluster, plan = a100_job(1, 6)
    prices = prices_of(model, cluster, plan)
    found = estimate(plan)
    strategy = Strategy.filled(sequence_length=2048.0, micro_batches=6.0)
    machine = Machine.of(cluster, cluster.pool("a800"), plan.job.precision.compute)
    vector = price(Shape.of(model, 0), strategy, machine, prices.constants)
    names = ("blocks", "embedding and head", "optimizer")
    both = sum(float(vector.parts[name]) for name in names)
    # The simulated step adds only the first batch's copy to the chip.
    assert found.result.step_seconds == pytest.approx(both, rel=1e-4)
    busy = sum(seconds for name, seconds in found.parts.items() if name in ("forward", "backward"))
    assert busy == pytest.approx(both - float(vector.parts["optimizer"]), rel=1e-9)


def test_equal_stages_take_the_closed_form_of_the_units():
    model, cluster, plan = a100_job(4, 8)
    times = unit_times(model, cluster, plan, 1)
    priced = estimate(plan).priced
    # Same schedule, embedding and head made free and sends instant: four equal stages.
    from tutti.cost.plan.simulator_inputs import ClassCosts, StepCosts
    from tutti.schedule.schedule import build_schedule
    from tutti.simulate.run import simulate

    schedule = build_schedule(plan)
    per_stage = model.num_layers // 4
    seconds = {
        Op.FORWARD: per_stage * times.forward,
        Op.BACKWARD_INPUT: per_stage * times.backward_input,
        Op.BACKWARD_WEIGHT: per_stage * times.backward_weight,
    }
    classes = tuple(
        ClassCosts.plain(np.array([seconds.get(e.op, 0.0) for e in c.instructions]))
        for c in schedule.classes
    )
    # The last weight pass is cut into buckets, each of which would take the whole time.
    fused = tuple(
        replace(costs, seconds=_once_per_pass(c.instructions, costs.seconds))
        for c, costs in zip(schedule.classes, classes, strict=True)
    )
    result = simulate(schedule, StepCosts(classes=fused))
    closed = one_f_one_b_seconds(
        4,
        8,
        forward=seconds[Op.FORWARD],
        backward_input=seconds[Op.BACKWARD_INPUT],
        backward_weight=seconds[Op.BACKWARD_WEIGHT],
    )
    assert result.step_seconds == pytest.approx(closed, rel=1e-9)
    assert len(priced.costs.classes) == 4


def _once_per_pass(entries, seconds):
    """Give the first instruction of each pass its whole time, further cuts of it none."""
    seen: set[object] = set()
    found = seconds.copy()
    for index, entry in enumerate(entries):
        key = (entry.op, entry.micro_batch)
        if key in seen:
            found[index] = 0.0
        seen.add(key)
    return found


def test_more_chips_more_throughput_and_full_recompute_costs_a_forward():
    model, cluster, plan = a100_job(1, 8)
    plain = estimate(plan)
    _, _, again = a100_job(1, 8, recompute="full")
    recomputed = estimate(again)
    assert recomputed.hfu > recomputed.mfu
    assert plain.hfu == pytest.approx(plain.mfu)
    extra = recomputed.result.step_seconds / plain.result.step_seconds
    assert 1.2 < extra < 1.4
    assert recomputed.tightest.total < plain.tightest.total
    wide = uniform_plan(
        model, cluster, Job(sequence_length=2048, global_batch=8), Degrees(tp=8, dp=1)
    )
    assert estimate(wide).step_seconds < plain.step_seconds / 3


def test_a_slow_cross_pool_link_shows():
    """Halving the bandwidth between the pools makes the boundary's sends take longer."""
    model, cluster = load_model("llama-2-7b"), Cluster.load("E1000")
    job = Job(sequence_length=2048, global_batch=512)
    seconds = []
    for fraction in (1.0, 0.25):
        links = tuple(replace(link, nic_fraction=fraction) for link in cluster.fabric.links)
        slower = replace(cluster, fabric=replace(cluster.fabric, links=links))
        found = estimate(uniform_plan(model, slower, job, Degrees(tp=8, pp=2)))
        sends = [
            float(costs.seconds[i])
            for c, costs in zip(found.schedule.classes, found.priced.costs.classes, strict=True)
            for i, entry in enumerate(c.instructions)
            if entry.op is Op.SEND
        ]
        seconds.append(max(sends))
    assert seconds[1] > 2 * seconds[0]


def test_extrapolation_is_called_so():
    model, cluster, plan = a100_job(1, 2)
    assert estimate(plan).priced.extrapolations == ()
    job = Job(sequence_length=65536, global_batch=2)
    far = uniform_plan(model, cluster, job, Degrees(tp=8, dp=1))
    assert any("sequence_length 65536" in line for line in estimate(far).priced.extrapolations)


@pytest.mark.parametrize("kind", list(ScheduleKind))
def test_schedules_order_as_they_should(kind):
    vpp = 2 if kind is ScheduleKind.INTERLEAVED else 1
    base = estimate(uniform(4, 16, ScheduleKind.GPIPE)).result
    other = estimate(uniform(4, 16, kind, vpp=vpp)).result
    memory = max(c.peak_bytes - c.static_bytes for c in other.classes)
    if kind is ScheduleKind.ONE_F_ONE_B:
        assert memory < max(c.peak_bytes - c.static_bytes for c in base.classes)
    assert other.step_seconds > 0


@pytest.mark.parametrize("case", ["level 2", "gradients on the host"])
def test_memory_does_not_grow_with_micro_batches(case):
    """What a reduction or an offload has to carry away holds the passes back, not piles up."""
    model, cluster = load_model("llama-2-7b"), Cluster.load("S16")
    peaks = []
    for batch in (32, 128):
        degrees = Degrees(dp=8, shard=2 if case == "level 2" else 1)
        plan = uniform_plan(model, cluster, Job(sequence_length=512, global_batch=batch), degrees)
        if case != "level 2":
            stage = plan.pipelines[0].stages[0]
            held = tuple(
                replace(r, offload=replace(r.offload, gradients=((1, 33),))) for r in stage.replicas
            )
            line = replace(plan.pipelines[0], stages=(replace(stage, replicas=held),))
            plan = replace(plan, pipelines=(line,))
        peaks.append(max(memory.moving for memory in estimate(plan).memory))
    assert peaks[1] <= peaks[0] * 1.01


def test_tied_tables_are_held_once():
    model, cluster = load_model("llama-3.2-1b"), Cluster.load("S16")
    plan = uniform_plan(model, cluster, Job(sequence_length=512, global_batch=8), Degrees(dp=8))
    static = estimate(plan).memory[0]
    assert static.parameters == pytest.approx(2 * model.num_parameters)


@pytest.mark.parametrize("kind", ["ring", "all_gather"])
@pytest.mark.parametrize(("tp", "cp", "chunks"), [(4, 1, 4), (4, 2, 1), (2, 4, 2), (8, 1, 1)])
def test_a_block_of_a_plan_takes_what_the_vectorised_price_says(kind, tp, cp, chunks):
    """Chunks and context, too: the same formulas on both paths."""
    model, cluster, plan = a100_job(1, 6)
    stage = plan.pipelines[0].stages[0]
    group = replace(stage.replicas[0], tp=tp, cp=cp, sequence_parallel=True)
    prices = prices_of(model, cluster, plan)
    times = prices.unit(
        workload_of(plan, stage, group),
        1,
        "full",
        overlap_chunks=chunks,
        context_kind=ContextKind(kind),
    )
    strategy = Strategy.filled(
        sequence_length=2048.0,
        micro_batches=1,
        tp=tp,
        cp=cp,
        sequence_parallel=1,
        overlap_chunks=chunks,
        context_gather=float(kind == "all_gather"),
        recompute_gemm=1,
        recompute_attention=1,
        recompute_elementwise=1,
        recompute_network=1,
    )
    machine = Machine.of(cluster, cluster.pool("a800"), plan.job.precision.compute)
    vector = price(Shape.of(model, 0), strategy, machine, prices.constants)
    both = times.forward + times.recompute + times.backward_input + times.backward_weight
    assert model.num_layers * both == pytest.approx(float(vector.parts["blocks"]), rel=1e-12)
