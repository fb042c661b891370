"""Units by a profile: sums of operators; plans and the search are priced by the same figures."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.measured import SHAPES, measured_profile, true_seconds
from tutti.cost.measured.calls import unit_calls
from tutti.cost.measured.forms import FORMS, NARROW, SERVED
from tutti.cost.measured.pools import measured_pools
from tutti.cost.measured.unit import predict_block, strategy_of, unit_shapes
from tutti.cost.plan.plan_costs import pool_prices, price_schedule
from tutti.cost.plan.sources import Sources
from tutti.errors import InputError
from tutti.hardware.chip import Dtype
from tutti.hardware.cluster import Cluster
from tutti.hardware.library import shipped
from tutti.hardware.pool import Pool
from tutti.hardware.profile import Profile
from tutti.models.load import load_model
from tutti.models.operators import Workload
from tutti.plan.job import PRECISIONS, Job
from tutti.plan.uniform import Degrees, uniform_plan
from tutti.schedule.schedule import build_schedule
from tutti.search.ask_from_values import Limits, make_problem
from tutti.search.pricing.unit_tables import Config, Tables

MODEL = load_model("llama-3.2-1b")
LIBRARY = shipped()
POOL = Pool(name="h200", node=LIBRARY.node_for(LIBRARY.chips["H200"]), nodes=1)
CLUSTER = Cluster(name="one-node", pools=(POOL,))
PROFILE = measured_profile()
WORK = Workload(sequences=2, sequence_length=4096)


def plan_of(degrees="tp=2,dp=4,mbs=2", **job):
    values = {"sequence_length": 4096, "global_batch": 32, **job}
    return uniform_plan(MODEL, CLUSTER, Job(**values), Degrees.parse(degrees))


def test_a_block_is_the_sum_of_its_operators():
    found = predict_block(PROFILE, MODEL, WORK)
    forward = sum(
        float(np.asarray(call.times)) * true_seconds(call.operator, tuple(map(float, call.dims)))
        for call in unit_calls(MODEL, 1, strategy_of(WORK))
        if call.operator in SHAPES
    )
    assert found.forward == pytest.approx(forward, rel=0.05)
    assert found.total == pytest.approx(sum(found.parts.values()))
    assert found.backward > 1.5 * found.forward
    assert found.outside == ()


def test_a_slow_host_is_a_floor():
    slow = predict_block(measured_profile(issue_s=1.0), MODEL, WORK)
    calls = unit_calls(MODEL, 1, strategy_of(WORK))
    assert slow.forward == pytest.approx(sum(float(np.asarray(c.times)) for c in calls))


def test_graphs_leave_a_share_of_the_hosts_time_where_blocks_can_be_graphs():
    slow = measured_profile(issue_s=1.0)
    whole, graphs = (
        pool_prices(plan_of(), MODEL, CLUSTER, Sources(profiles=(profile,)), {"h200"})["h200"]
        for profile in (slow, replace(slow, graph_share=0.25))
    )

    def share(recompute="none", unit=1, **degrees):
        work = Workload(sequences=1, sequence_length=4096, **degrees)
        one, other = (prices.unit(work, unit, recompute).forward for prices in (graphs, whole))
        return one / other

    assert share() == pytest.approx(0.25, rel=0.01)
    assert share(tp=2) == share(cp=2) == 1.0, "ranks talk inside of the block"
    assert share("full") == share("selective") == 1.0
    assert share(unit=0) == share(unit=MODEL.head_unit) == 1.0


def test_held_out_shapes_are_predicted_by_their_neighbours():
    used = unit_shapes(MODEL, 1, WORK)
    known = {(row.operator, row.shape) for row in PROFILE.operators}
    assert used & known
    without = PROFILE.without(used)
    assert not {(row.operator, row.shape) for row in without.operators} & used
    whole, held = predict_block(PROFILE, MODEL, WORK), predict_block(without, MODEL, WORK)
    assert held.total == pytest.approx(whole.total, rel=0.1)
    with pytest.raises(InputError, match="there is no unit 99"):
        predict_block(PROFILE, MODEL, WORK, unit=99)


def test_a_plan_is_priced_by_the_profile():
    plan = plan_of()
    schedule = build_schedule(plan)
    plain = price_schedule(schedule, MODEL, CLUSTER)
    priced = price_schedule(schedule, MODEL, CLUSTER, Sources(profiles=(PROFILE,)))
    assert priced.basis["h200"].startswith("profile of H200 (a known chip, 2026-01-31); its links")
    assert priced.extrapolations == ()
    assert sum(priced.costs.classes[0].seconds) != sum(plain.costs.classes[0].seconds)


def test_units_alone_together_and_in_the_search_have_one_price():
    sources = Sources(profiles=(PROFILE,))
    plan = plan_of()
    works = [Workload(sequences=n, sequence_length=4096, tp=tp) for n in (1, 2) for tp in (1, 2, 4)]
    alone = pool_prices(plan, MODEL, CLUSTER, sources, {"h200"})["h200"]
    together = pool_prices(plan, MODEL, CLUSTER, sources, {"h200"})["h200"]
    together.prepare(works, (0, 1, MODEL.head_unit))
    problem = make_problem("llama-3.2-1b", CLUSTER, sequence_length=4096, global_batch=32,
                           sources=sources, limits=Limits())  # fmt: skip
    tables = Tables(problem)
    for work in works:
        for unit in (0, 1, MODEL.head_unit):
            one, many = (prices.unit(work, unit, "full") for prices in (alone, together))
            for name in ("forward", "recompute", "backward_input", "backward_weight"):
                assert getattr(many, name) == pytest.approx(getattr(one, name), rel=1e-9)
        if work.tp == 1:
            found = tables.get(Config("h200", sequences=work.sequences))
            assert found.forward[0, 1] == pytest.approx(alone.unit(work, 1, "none").forward)


def test_the_optimizer_and_its_measured_rate():
    prices = pool_prices(plan_of(), MODEL, CLUSTER, Sources(profiles=(PROFILE,)), {"h200"})["h200"]
    mixed = plan_of().job  # a master copy and gradients in fp32: 30 bytes instead of 22
    pure = replace(mixed, precision=PRECISIONS["pure_bf16"])  # 14
    for job, moved in ((mixed, 30.0), (pure, 14.0)):
        true = true_seconds("adamw", (2.0**26 * moved / 22.0,))
        assert job.update_bytes == moved
        assert prices.optimizer(2.0**26, job) == pytest.approx(true, rel=0.05)
    assert prices.optimizer(0.0, mixed) >= 0.0


def test_shapes_outside_the_profile_are_said():
    plan = plan_of(sequence_length=65536, global_batch=4, degrees="tp=8")
    priced = price_schedule(build_schedule(plan), MODEL, CLUSTER, Sources(profiles=(PROFILE,)))
    assert any("profile: attention length 6.554e+04" in line for line in priced.extrapolations)


@pytest.mark.parametrize(
    ("profiles", "message"),
    [
        ([measured_profile("A100-80")], "profile of A100-80: the plan runs on H200; measure it"),
        ([PROFILE, PROFILE], "two profiles of H200: give one of them"),
        ([measured_profile(dtype=Dtype.FP32)], "no 'linear' in bf16; it measured fp32"),
        ([Profile.nominal(LIBRARY.chips["H200"])], "holds no measurements; run tutti profile"),
    ],
)
def test_a_profile_that_does_not_suit_is_one_line(profiles, message):
    with pytest.raises(InputError) as caught:
        measured_pools(profiles, CLUSTER, {"h200": Dtype.BF16})
    assert message in str(caught.value)


def test_an_alias_names_the_chip():
    aliased = measured_profile("H200-SXM")
    assert set(measured_pools([aliased], CLUSTER, {"h200": Dtype.BF16})) == {"h200"}


def test_every_form_is_priced_in_every_direction():
    """Whatever an enumeration may name has a price, by a measurement or a stand-in."""
    (chip,) = measured_pools([PROFILE], CLUSTER, {"h200": Dtype.BF16}).values()
    for name, form in FORMS.items():
        if name in NARROW.values():  # named by jobs in fp8, which ask for rows of their own
            continue
        if form.directions == SERVED and form.part != "elementwise":  # asked for where `serves`
            continue
        for direction in form.directions:
            assert float(chip.seconds(name, direction, (512.0,) * len(form.dims))) >= 0.0


def test_products_of_8_bits_are_priced_by_their_own_rows() -> None:
    wide = measured_profile()
    halves = tuple(
        replace(row, operator=f"narrow_{row.operator}", seconds=row.seconds / 2.0)
        for row in wide.operators
        if row.operator.startswith("linear.")
    )
    both = replace(wide, operators=wide.operators + halves)
    work = Workload(sequences=2, sequence_length=2048)
    for name in ("llama-3-8b", "mixtral-8x7b"):
        spec = load_model(name)
        usual, narrow = (predict_block(both, spec, work, dtype=d) for d in (Dtype.BF16, Dtype.FP8))
        products = narrow.parts["gemm"] / usual.parts["gemm"]
        assert products == pytest.approx(0.5, abs=0.02), "the router stays as it is"
        assert narrow.parts["attention"] == usual.parts["attention"]
    with pytest.raises(InputError, match="has no products of 8 bits"):
        predict_block(wide, spec, work, dtype=Dtype.FP8)
    assert unit_shapes(spec, 1, work) > {
        ("narrow_grouped_linear.forward", (8192, 28672, 4096, 8)),
        ("grouped_linear.forward", (8192, 28672, 4096, 8)),
    }
