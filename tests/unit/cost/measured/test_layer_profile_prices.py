"""Plans priced by per-layer profiles: hand-computed sums, refusals, flags."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.unit.cost.layer_folder import MODEL, PUBLISHED, UNITS, write_folder
from tutti.cost.measured.layer_profiles import LayerProfiles
from tutti.cost.plan.sources import Sources
from tutti.errors import InputError
from tutti.hardware.cluster import Cluster
from tutti.models.load import load_model
from tutti.plan.job import Job
from tutti.plan.uniform import Degrees, uniform_plan
from tutti.schedule.instruction import Op
from tutti.simulate.estimate import estimate

PASSES = (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)


@pytest.fixture
def profiles(tmp_path):
    return LayerProfiles.load(write_folder(tmp_path / "made-up"))


def opt_plan(model=MODEL, cluster="OPT-8", length=2048, batch=256, **degrees):
    job = Job(sequence_length=length, global_batch=batch)
    return uniform_plan(model, Cluster.load(cluster), job, Degrees(**degrees))


def compute_seconds(found, stage, ops=PASSES):
    index, rank_class = next(
        (i, c) for i, c in enumerate(found.schedule.classes) if c.stage == stage
    )
    seconds = found.priced.costs.classes[index].seconds
    pairs = zip(rank_class.instructions, seconds, strict=True)
    return sum(s for entry, s in pairs if entry.op in ops)


@pytest.mark.parametrize("mbs", [1, 2])
def test_stages_take_what_was_measured(profiles, mbs):
    plan = opt_plan(pp=2, micro_batch=mbs)
    found = estimate(plan, sources=Sources(layer_profiles=profiles))
    count = plan.pipelines[0].micro_batches
    each = 1e-3 * (1 + 2 * mbs)
    assert compute_seconds(found, 0) == pytest.approx(count * 13 * each / 4)
    assert compute_seconds(found, 1) == pytest.approx(count * 14 * each)  # the head counts twice
    for stage in (0, 1):
        assert compute_seconds(found, stage, (Op.STEP,)) == pytest.approx(0.052 * 13 / UNITS)
    forward = compute_seconds(found, 1, (Op.FORWARD,))
    assert forward == pytest.approx(compute_seconds(found, 1) / 3)
    assert found.priced.basis["a100"].startswith(
        "layer profile made-up (A100 for A100-40-opt, tp 1 2, batches 1 to 4)"
    )
    assert found.priced.extrapolations == ()


def test_memory_is_what_was_measured(profiles):
    plan = opt_plan(pp=2, micro_batch=2)
    found = estimate(plan, sources=Sources(layer_profiles=profiles))
    figures = profiles.at("V100", 1, 2)
    last = found.memory[-1]
    held = last.parameters + last.gradients + last.optimizer
    assert held == pytest.approx(figures.fixed_bytes[13:].sum())
    assert last.parameters == pytest.approx(figures.parameter_bytes[13:].sum())
    moving = (figures.memory_bytes - figures.fixed_bytes)[13:].sum()
    assert moving <= last.moving <= moving + 6 * 2 * 2048 * 1024 * 2  # boundary buffers
    first = profiles.at("A100", 1, 2)
    two_in_flight = 2 * (first.memory_bytes - first.fixed_bytes)[:13].sum()
    assert two_in_flight <= found.memory[0].moving <= two_in_flight + 6 * 2 * 2048 * 1024 * 2


def test_sharded_states_and_their_step_shrink(profiles):
    whole = estimate(opt_plan(pp=2), sources=Sources(layer_profiles=profiles))
    sharded = estimate(opt_plan(pp=2, shard=1), sources=Sources(layer_profiles=profiles))
    assert sharded.memory[0].optimizer == pytest.approx(whole.memory[0].optimizer / 8)
    step = compute_seconds(sharded, 0, (Op.STEP,))
    assert step == pytest.approx(compute_seconds(whole, 0, (Op.STEP,)) / 8)


def test_recomputation_runs_forward_again_and_keeps_less(profiles):
    plain = estimate(opt_plan(pp=2), sources=Sources(layer_profiles=profiles))
    again = estimate(opt_plan(pp=2, recompute="full"), sources=Sources(layer_profiles=profiles))
    extra = compute_seconds(again, 0, (Op.RECOMPUTE,))
    assert 0.8 < extra / compute_seconds(plain, 0, (Op.FORWARD,)) <= 1.01
    assert again.memory[0].moving < plain.memory[0].moving


def test_beyond_the_measured_batches(profiles):
    plan = opt_plan(pp=2, micro_batch=8)
    with pytest.raises(InputError, match="8 sequences per micro-batch outside the measured 1 to 4"):
        estimate(plan, sources=Sources(layer_profiles=profiles))
    found = estimate(plan, sources=Sources(layer_profiles=profiles, extrapolate=True))
    assert any("a100: layer profile A100, tp 1: 8" in line for line in found.priced.extrapolations)


def test_another_sequence_length(profiles):
    plan = opt_plan(pp=2, length=1024, micro_batch=2)
    with pytest.raises(InputError, match="sequence_length 1024, measured at 2048; measure it"):
        estimate(plan, sources=Sources(layer_profiles=profiles))
    found = estimate(plan, sources=Sources(layer_profiles=profiles, extrapolate=True))
    assert any("measured at 2048" in line for line in found.priced.extrapolations)
    count = plan.pipelines[0].micro_batches
    assert compute_seconds(found, 1) == pytest.approx(count * 14 * 3e-3)  # one sequence's tokens


def test_a_degree_that_was_not_measured(profiles):
    with pytest.raises(InputError, match="V100 was measured with tp 1, not 2"):
        estimate(opt_plan(pp=2, tp=2), sources=Sources(layer_profiles=profiles, extrapolate=True))


def test_another_model(profiles):
    other = load_model("llama-2-7b")
    plan = opt_plan(other, pp=2)
    with pytest.raises(InputError, match="has 26 layers, but llama-2-7b has 34 units"):
        estimate(plan, sources=Sources(layer_profiles=profiles))
    plan = opt_plan(load_model("opt-1.3b"), pp=2)  # as many blocks, but wider ones
    with pytest.raises(InputError, match="is it another model"):
        estimate(plan, sources=Sources(layer_profiles=profiles))


def test_chips_that_were_not_measured(profiles, tmp_path):
    with pytest.raises(InputError, match=r"covers A100, V100, but the plan runs on"):
        estimate(opt_plan(cluster="E100", pp=2), sources=Sources(layer_profiles=profiles))
    for path in (tmp_path / "made-up").glob("V100*"):
        path.unlink()
    half = estimate(
        opt_plan(pp=2), sources=Sources(layer_profiles=LayerProfiles.load(tmp_path / "made-up"))
    )
    assert half.priced.basis["v100"] == "nominal, not measured"
    assert half.priced.basis["a100"].startswith("layer profile")


def test_without_a_profile_nothing_changes():
    plan = opt_plan(pp=2)
    assert (
        estimate(plan).step_seconds
        == estimate(plan, sources=Sources(layer_profiles=None)).step_seconds
    )


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="needs ../shared beside the checkout")
def test_the_published_profile_on_the_shipped_cluster():
    """Equals the sums of the files' entries; the step is the comparison formula's."""
    plan = opt_plan(pp=2, micro_batch=2, batch=1024)
    found = estimate(plan, sources=Sources(layer_profiles=LayerProfiles.load(PUBLISHED)))
    count = plan.pipelines[0].micro_batches
    assert count == 64
    times, optimizers = [], []
    for stage, chip in enumerate(("A100", "V100")):
        value = json.loads((PUBLISHED / f"{chip}_tp1_bs2.json").read_text())["execution_time"]
        units = value["layer_compute_total_ms"][13 * stage : 13 * stage + 13]
        times.append(1e-3 * sum(units))
        optimizers.append(1e-3 * value["optimizer_time_ms"] * 13 / 26)
        assert compute_seconds(found, stage) == pytest.approx(count * times[-1], rel=1e-12)
        step = compute_seconds(found, stage, (Op.STEP,))
        assert step == pytest.approx(optimizers[-1], rel=1e-12)
    formula = (count - 1) * max(times) + sum(times) + max(optimizers)
    # The last gradient is sent before the weight passes, a third, that made it wait there.
    assert formula - max(times) / 3 <= found.result.step_seconds < 1.01 * formula


def test_replicas_of_a_cut_that_differs(profiles):
    """An uneven cut: 7 units on the V100s, 19 on the A100s, as Metis plans it."""
    plan = opt_plan(pp=2, micro_batch=2)
    pipeline = plan.pipelines[0]
    first, second = pipeline.stages
    stages = (replace(first, units=((0, 19),)), replace(second, units=((19, UNITS),)))
    uneven = replace(plan, pipelines=(replace(pipeline, stages=stages),))
    found = estimate(uneven, sources=Sources(layer_profiles=profiles))
    count = pipeline.micro_batches
    assert compute_seconds(found, 0) == pytest.approx(count * 19 * 5e-3 / 4)
    assert compute_seconds(found, 1) == pytest.approx(count * 8 * 5e-3)
