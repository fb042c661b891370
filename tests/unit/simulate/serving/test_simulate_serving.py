"""A deployment, simulated: every request ends once, leaps change nothing, shares are kept."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from tests.support.deployments import (
    CHAT,
    engine_pipeline,
    mixed_plan,
    separated_plan,
    serving_plan,
)
from tutti.batching import StepSize
from tutti.errors import InputError
from tutti.hardware.cluster import Cluster
from tutti.models.cached import cached_bytes
from tutti.models.load import load_model
from tutti.plan.chips import ChipSet
from tutti.plan.plan import Plan, Replica, Stage
from tutti.report.serving import serving_page
from tutti.simulate.serving import simulated_engine
from tutti.simulate.serving.requests import Requests, draw, summed_up
from tutti.simulate.serving.run import Deployment, simulate_serving
from tutti.simulate.serving.trace import write_serving_trace

FEW = draw(replace(CHAT, requests_per_s=60.0), 40, seed=3)


def test_every_request_ends_once():
    result = simulate_serving(Deployment.of(mixed_plan()), FEW, every_engine=True)
    assert result.simulated == result.requests == 40
    assert (result.first_s > 0).all()
    assert (result.whole_s >= result.first_s).all()
    assert result.output_tokens == FEW.outputs.sum()
    assert 0 < result.within <= 1
    assert all(0 < share <= 1 for use in result.engines for share in use.stage_use)


def test_an_idle_engine_takes_the_price_of_its_steps():
    plan = mixed_plan()
    deployment = Deployment.of(replace(plan, pipelines=plan.pipelines[:1]))
    alone = Requests(times=np.zeros(1), prompts=np.array([100]), outputs=np.array([1]))
    result = simulate_serving(deployment, alone)
    prices = deployment.prices[0]
    scheduled = prices.prices().seconds(StepSize(0, 0, 0).with_chunk(start=0, count=100))
    assert float(result.first_s[0]) == pytest.approx(scheduled, rel=0.2)
    more = Requests(times=np.zeros(1), prompts=np.array([100]), outputs=np.array([101]))
    longer = simulate_serving(deployment, more)
    assert longer.engines[0].steps == 101
    decode = prices.prices().seconds(StepSize(decodes=1, prefill=0, keys=150))
    assert float(longer.per_token_s[0]) == pytest.approx(decode, rel=0.1)


@pytest.mark.parametrize("leaps", [True, False])
def test_who_comes_while_a_step_is_under_way_misses_the_next(monkeypatch, leaps):
    model = load_model("qwen3-8b")
    pipeline = engine_pipeline(model, "h100/0/0", slots=16, pages=8192)
    cluster = Cluster.load("small-mixed")
    deployment = Deployment.of(serving_plan(pipeline, model=model, cluster=cluster))
    assert deployment.prices[0].launches_ahead
    alone = Requests(times=np.zeros(1), prompts=np.array([100]), outputs=np.array([60]))
    monkeypatch.setattr(simulated_engine.SimulatedEngine, "_leaps", False)
    steps = simulate_serving(deployment, alone, keep_steps=100).steps
    ninth = steps[8]
    middle = (ninth.begins_s + ninth.ends_s) / 2
    monkeypatch.setattr(simulated_engine.SimulatedEngine, "_leaps", leaps)
    both = Requests(
        times=np.array([0.0, middle]), prompts=np.array([100, 300]), outputs=np.array([60, 1])
    )
    result = simulate_serving(deployment, both)
    first = result.first_s[1] + middle
    own = deployment.prices[0].prices().seconds(StepSize(1, 0, 110).with_chunk(start=0, count=300))
    assert first - own == pytest.approx(steps[9].ends_s, rel=0.01), "the tenth is made already"


def test_pages_on_the_host_are_priced_and_pay_where_prompts_are_long():
    model, cluster = load_model("qwen3-8b"), Cluster.load("small-mixed")
    requests = Requests(times=np.zeros(24), prompts=np.full(24, 1500), outputs=np.full(24, 400))

    def served(host_pages, chips="h100/0/0", count=1):
        pipeline = engine_pipeline(
            model, chips, count=count, slots=24, pages=1600, host_pages=host_pages
        )
        deployment = Deployment.of(serving_plan(pipeline, model=model, cluster=cluster))
        return deployment.prices[0], simulate_serving(deployment, requests)

    _, anew = served(0)
    prices, kept = served(2000)
    with pytest.raises(InputError, match=r"node h100/0 keep .* in pages on their host, which has"):
        served(1_000_000)
    # engines of one node share its memory: what one of them may keep is too much for four
    assert served(400_000)
    with pytest.raises(InputError, match="give fewer host_pages"):
        served(400_000, "h100/0/0-3", count=4)
    assert anew.engines[0].preemptions > 0
    assert anew.engines[0].stowed_pages == 0
    use = kept.engines[0]
    assert use.stowed_pages >= use.fetched_pages > 0
    assert kept.seconds < anew.seconds
    decodes = StepSize(decodes=8, prefill=0, keys=8000)
    moved = decodes._replace(stows=10, fetches=30)
    page = 16 * cached_bytes(model, range(model.num_units))
    host = cluster.pool("h100").node.host
    more = prices.prices().seconds(moved) - prices.prices().seconds(decodes)
    assert more == pytest.approx(
        40 * page / host.device_bandwidth + 2 * host.device_latency_s, rel=1e-6
    )


@pytest.mark.parametrize("rate", [5.0, None], ids=["few", "at once"])
def test_leaps_change_nothing(monkeypatch, rate):
    requests = draw(replace(CHAT, requests_per_s=rate), 24, seed=1)
    small = [replace(p, micro_batch=8 * p.copies, stages=tuple(
        replace(s, replicas=tuple(replace(r, sequences=8) for r in s.replicas)) for s in p.stages))
        for p in mixed_plan().pipelines]  # fmt: skip
    plan = mixed_plan()
    plan = replace(plan, pipelines=tuple(small), job=replace(plan.job, global_batch=24))
    deployment = Deployment.of(plan)
    leaping = simulate_serving(deployment, requests, every_engine=True)
    monkeypatch.setattr(simulated_engine.SimulatedEngine, "_leaps", property(lambda self: False))
    walking = simulate_serving(deployment, requests, every_engine=True)
    np.testing.assert_allclose(leaping.first_s, walking.first_s, rtol=1e-9)
    np.testing.assert_allclose(leaping.whole_s, walking.whole_s, rtol=1e-9)
    assert [use.steps for use in leaping.engines] == [use.steps for use in walking.engines]
    for fast, slow in zip(leaping.engines, walking.engines, strict=True):
        np.testing.assert_allclose(fast.stage_use, slow.stage_use, rtol=1e-6)


def test_equal_engines_are_simulated_once():
    once = simulate_serving(Deployment.of(mixed_plan()), FEW)
    each = simulate_serving(Deployment.of(mixed_plan()), FEW, every_engine=True)
    assert once.simulated < each.simulated
    assert once.percentiles("per_token_s")["p50"] == pytest.approx(
        each.percentiles("per_token_s")["p50"], rel=0.1
    )


def test_separated_roles_hand_over():
    result = simulate_serving(Deployment.of(separated_plan()), FEW)
    prefill, decode = result.engines
    assert prefill.rows_per_step == 0.0
    assert decode.rows_per_step == decode.tokens_per_step > 0
    assert (result.whole_s > 0).all()
    assert result.simulated == 20  # one of the two decode engines stands for both
    each = simulate_serving(Deployment.of(separated_plan()), FEW, every_engine=True)
    assert each.simulated == 40


def _staged(lanes: int) -> Plan:
    model, cluster = load_model("qwen3-8b"), Cluster.load("small-mixed")
    base = engine_pipeline(model, "h100/0/0", slots=16, pages=8192)
    stages = tuple(
        Stage(units=(units,), replicas=(Replica(chips=ChipSet.of(chips), sequences=16),))
        for units, chips in (((0, 25), "h100/0/0"), ((25, model.num_units), "a100/0/0"))
    )
    return serving_plan(
        replace(base, stages=stages, micro_batch=16, micro_batches=lanes),
        model=model,
        cluster=cluster,
    )


def test_several_steps_under_way_fill_the_stages():
    requests = draw(replace(CHAT, requests_per_s=None), 48, seed=2)
    one = simulate_serving(Deployment.of(_staged(1)), requests)
    two = simulate_serving(Deployment.of(_staged(2)), requests)
    assert two.output_rate > 1.4 * one.output_rate
    assert min(two.engines[0].stage_use) > min(one.engines[0].stage_use)


@pytest.mark.parametrize("rate", [3.0, 12.0, None], ids=["few", "many", "at once"])
def test_steps_of_lanes_that_are_alike_change_nothing(monkeypatch, rate):
    plan = _staged(3)
    (pipeline,) = plan.pipelines
    assert pipeline.engine is not None
    engine = replace(pipeline.engine, chunk=45, pages=300)
    plan = replace(plan, pipelines=(replace(pipeline, engine=engine),))
    traffic = replace(CHAT, requests_per_s=rate)
    deployment = Deployment.of(plan)
    requests = draw(traffic, 60, seed=4)
    alike = simulate_serving(deployment, requests, keep_steps=10_000)
    monkeypatch.setattr(simulated_engine.SimulatedEngine, "_repeats", property(lambda self: False))
    each = simulate_serving(deployment, requests, keep_steps=10_000)
    assert alike.steps == each.steps
    assert (alike.first_s == each.first_s).all()
    assert (alike.whole_s == each.whole_s).all()
    assert alike.engines == each.engines


def test_shared_prefixes_save_prefill():
    traffic = replace(CHAT, prompt=replace(CHAT.prompt, mean=600, sigma=0.0), requests_per_s=20.0)
    plain = draw(traffic, 16)
    shared = draw(replace(traffic, shared_prefix=512), 16)
    deployment = Deployment.of(mixed_plan())
    without, with_prefix = (
        simulate_serving(deployment, requests, every_engine=True) for requests in (plain, shared)
    )
    tokens = [sum(u.tokens_per_step * u.steps for u in r.engines) for r in (without, with_prefix)]
    assert tokens[1] < 0.75 * tokens[0]


def test_a_request_that_is_too_long_is_refused():
    long = Requests(times=np.zeros(1), prompts=np.array([4000]), outputs=np.array([10]))
    with pytest.raises(InputError, match=r"4,000 \+ 10 tokens; the plan's engines take 2,048"):
        simulate_serving(Deployment.of(mixed_plan()), long)


def test_drawn_requests_are_as_described():
    requests = draw(replace(CHAT, requests_per_s=10.0), 4000, seed=5)
    told = summed_up(requests)
    assert told.requests_per_s == pytest.approx(10.0, rel=0.05)
    assert told.prompt.longest <= 1024
    assert told.output.mean == pytest.approx(200, rel=0.1)
    again = draw(replace(CHAT, requests_per_s=10.0), 4000, seed=5)
    assert (requests.times == again.times).all()


def test_page_and_trace(tmp_path):
    plan = mixed_plan()
    result = simulate_serving(Deployment.of(plan), FEW, keep_steps=100)
    page = serving_page(plan, result).html()
    assert "Use of the chips" in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    write_serving_trace(tmp_path / "trace.json", result)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == len(result.steps) > 0
