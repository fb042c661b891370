"""The compiled loop makes the same steps as the engine's own scheduler, one after the other."""

from __future__ import annotations

import random
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
from tutti.errors import InputError
from tutti.hardware.cluster import Cluster
from tutti.models.load import load_model
from tutti.plan.chips import ChipSet
from tutti.plan.plan import Plan, Replica, Stage
from tutti.plan.serving import Lengths
from tutti.simulate.serving import engine_groups
from tutti.simulate.serving.requests import Requests, draw
from tutti.simulate.serving.result import ServingResult
from tutti.simulate.serving.run import Deployment, simulate_serving

MODEL, CLUSTER = load_model("qwen3-8b"), Cluster.load("small-mixed")


def _both(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, requests: Requests, every: bool
) -> tuple[ServingResult, ServingResult]:
    results = []
    for compiled in (True, False):
        monkeypatch.setattr(engine_groups, "FEW_TOKENS", 0 if compiled else 10**12)
        results.append(simulate_serving(Deployment.of(plan), requests, every_engine=every))
    return results[0], results[1]


def _assert_same(fast: ServingResult, slow: ServingResult) -> None:
    assert fast.simulated == slow.simulated
    for column in ("first_s", "whole_s", "per_token_s"):
        ours, theirs = getattr(fast, column), getattr(slow, column)
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9)
    assert fast.request_rate == pytest.approx(slow.request_rate, rel=1e-9)
    for ours, theirs in zip(fast.engines, slow.engines, strict=True):
        assert ours.steps == theirs.steps
        assert ours.preemptions == theirs.preemptions
        assert ours.most_pages == theirs.most_pages
        assert ours.tokens_per_step == pytest.approx(theirs.tokens_per_step, rel=1e-9)
        assert ours.rows_per_step == pytest.approx(theirs.rows_per_step, rel=1e-9)
        np.testing.assert_allclose(ours.stage_use, theirs.stage_use, rtol=1e-6)


def _drawn_plan(r: random.Random) -> Plan:
    """Return engines of one or two stages, few or many lanes, slots, pages and chunks."""
    slots, lanes = r.choice([1, 2, 5, 24]), r.choice([1, 1, 2, 3, 4])
    pages = lanes * r.choice([80, 100, 160, 1000])
    chunk, count = r.choice([1, 20, 45, 300, 2048]), r.choice([1, 2, 3])
    base = engine_pipeline(MODEL, f"h100/0/0-{count - 1}", count=count, pages=pages, chunk=chunk)
    if r.random() < 0.5:
        stages: tuple[Stage, ...] = tuple(
            Stage(
                units=(units,),
                replicas=(Replica(chips=ChipSet.of(chips), count=count, sequences=slots),),
            )
            for units, chips in (
                ((0, 25), f"h100/0/0-{count - 1}"),
                ((25, MODEL.num_units), f"a100/0/0-{count - 1}"),
            )
        )
    else:
        (whole,) = base.stages
        stages = (replace(whole, replicas=(replace(whole.replicas[0], sequences=slots),)),)
    pipeline = replace(base, stages=stages, micro_batch=slots * count, micro_batches=lanes)
    return serving_plan(pipeline, model=MODEL, cluster=CLUSTER)


def _drawn_requests(r: random.Random, seed: int) -> Requests:
    traffic = replace(
        CHAT,
        prompt=Lengths(mean=r.choice([1, 30, 200]), sigma=r.choice([0.0, 1.0]), longest=900),
        output=Lengths(mean=r.choice([1, 8, 60]), sigma=r.choice([0.0, 0.8]), longest=300),
        requests_per_s=r.choice([None, 2.0, 20.0, 80.0]),
        arrivals=r.choice(["poisson", "bursts", "even"]),
    )
    return draw(traffic, 60, seed)


@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(s, marks=pytest.mark.slow)
                                              for s in range(5, 120))])  # fmt: skip
def test_drawn_engines_make_the_same_steps(monkeypatch, seed):
    r = random.Random(seed)
    plan, requests = _drawn_plan(r), _drawn_requests(r, seed)
    _assert_same(*_both(monkeypatch, plan, requests, r.random() < 0.5))


@pytest.mark.parametrize("every", [True, False])
def test_separated_roles_make_the_same_steps(monkeypatch, every):
    requests = draw(replace(CHAT, requests_per_s=None), 120, seed=3)
    plan = separated_plan()
    small = replace(plan.pipelines[1].engine, pages=700)
    tight = replace(plan, pipelines=(plan.pipelines[0], replace(plan.pipelines[1], engine=small)))
    for each in (plan, tight):
        fast, slow = _both(monkeypatch, each, requests, every)
        _assert_same(fast, slow)
    assert slow.engines[1].preemptions > 0


def test_engines_to_which_nobody_comes_do_nothing(monkeypatch):
    alone = draw(replace(CHAT, requests_per_s=None), 1, seed=3)
    fast, slow = _both(monkeypatch, mixed_plan(), alone, True)
    _assert_same(fast, slow)
    assert fast.engines[1].steps == 0


def test_many_points_of_the_queue_keep_the_most_that_waited(monkeypatch):
    monkeypatch.setattr(engine_groups, "QUEUE_POINTS", 16)
    plan = _drawn_plan(random.Random(2))
    fast, slow = _both(monkeypatch, plan, draw(replace(CHAT, requests_per_s=None), 40), False)
    assert fast.queue[1].max() == slow.queue[1].max() > 0
    assert (np.diff(fast.queue[0]) >= 0).all()
    assert len(fast.queue[0]) <= 16


def test_a_request_beyond_all_pages_is_refused(monkeypatch):
    monkeypatch.setattr(engine_groups, "FEW_TOKENS", 0)
    pipeline = engine_pipeline(MODEL, "h100/0/0", pages=40)
    plan = serving_plan(pipeline, model=MODEL, cluster=CLUSTER)
    long = Requests(times=np.zeros(2), prompts=np.array([9, 900]), outputs=np.array([9, 90]))
    with pytest.raises(InputError, match=r"request 1: its 990 tokens need 62 pages of 16"):
        simulate_serving(Deployment.of(plan), long)


@pytest.mark.parametrize("seed", range(20))
def test_requests_are_dealt_alike(monkeypatch, seed):
    from tutti.loops import compiled
    from tutti.simulate.serving import dealing

    shares = np.random.default_rng(seed).random(seed % 5 + 1)
    shares /= shares.sum()
    walked = dealing.deal(shares, np.empty(500, np.int64))
    loop = compiled(dealing.deal)
    assert (loop(shares, np.empty(500, np.int64)) == walked).all()
    given = np.bincount(walked, minlength=len(shares))
    assert (np.abs(given - 500 * shares) <= len(shares)).all()
