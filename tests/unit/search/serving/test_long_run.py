"""What an engine promises in the long run is what the engine's own scheduler serves there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.unit.search.serving.test_plan_serving import _cluster
from tutti.models.load import load_model
from tutti.plan.serving import PAGE_SIZE, Lengths, Role, Service, Traffic
from tutti.search.serving.build_plan import build_plan
from tutti.search.serving.flows import Mixture
from tutti.search.serving.kinds import kinds_of
from tutti.search.serving.long_run import Held, chunks_of, rows_held, steps_of
from tutti.search.serving.options import EngineOption, best_engine
from tutti.search.serving.question import ServeProblem, ServeSpace
from tutti.search.serving.sizes import chain_wires
from tutti.simulate.serving.requests import draw
from tutti.simulate.serving.run import Deployment, simulate_serving

TRAFFIC = Traffic(
    prompt=Lengths(mean=200, sigma=0.8, longest=1024),
    output=Lengths(mean=30, sigma=0.8, longest=256),
)
ROOM = _cluster(
    {"name": "l4", "chip": "L4", "nodes": 4, "chips_per_node": 1},
    {"name": "t4", "chip": "T4", "nodes": 4, "chips_per_node": 1},
)
PROBLEM = ServeProblem(
    model=load_model("qwen2.5-14b"),
    cluster=ROOM,
    service=Service(traffic=TRAFFIC),
    space=ServeSpace(separate=False),
)


def _engine(*pools: str) -> EngineOption:
    kinds = {kind.pool: kind for kind in kinds_of(PROBLEM) if kind.tp == 1}
    option = best_engine(PROBLEM, tuple(kinds[pool] for pool in pools), Role.BOTH)
    assert option is not None
    return option


def _served(option: EngineOption, turns: int) -> float:
    mixture = Mixture(engines=((option, 1),), flows={}, rate=option.rate, bound=0.0)
    deployment = Deployment.of(build_plan(PROBLEM, mixture))
    return simulate_serving(deployment, draw(TRAFFIC, turns * option.slots, 1)).request_rate


def test_a_pipeline_serves_what_it_promises():
    option = _engine("t4", "t4", "l4", "l4")
    assert option.rate == pytest.approx(_served(option, 4), rel=0.1)
    assert option.ideal >= option.rate


@pytest.mark.slow
@pytest.mark.parametrize("pools", [("t4",) * 4, ("l4",) * 2, ("l4",) * 4, ("t4", "l4", "l4")])
def test_more_pipelines_serve_what_they_promise(pools):
    option = _engine(*pools)
    assert option.rate == pytest.approx(_served(option, 6), rel=0.1)


def test_sizes_that_the_model_prefers_are_better_in_the_simulator():
    chosen = _engine("t4", "t4", "t4", "t4")
    large = replace(chosen, chunk=2048)
    assert _served(large, 2) < 0.9 * chosen.rate


def test_those_who_stay_longer_weigh_more():
    drawn = draw(TRAFFIC, 200_000, 3).outputs.astype(np.float64)
    assert TRAFFIC.output.lasting == pytest.approx((drawn**2).sum() / drawn.sum(), rel=0.02)
    assert Lengths(mean=50, longest=60).lasting == 50
    held = Held.of(TRAFFIC)
    assert held.decode > TRAFFIC.prompt.expected + TRAFFIC.output.expected / 2.0
    assert held.prompt > TRAFFIC.prompt.expected


def test_rows_fill_the_pages_and_leave_steps_to_prompts():
    tokens = np.array([2_000.0, 10_000.0, 1e7])
    chunk, most = np.full(3, 512.0), np.full(3, 1e4)
    rows = rows_held(TRAFFIC, tokens, chunk, most)
    assert (np.diff(rows) > 0).all()
    assert rows[1] * Held.of(TRAFFIC).decode < tokens[1]
    chunks = chunks_of(TRAFFIC, rows, chunk, np.full(3, 4.0))
    assert chunks.share[2] == pytest.approx(1.0)  # prompts limit it: every step has some
    assert rows[2] + chunks.mean[2] == pytest.approx(512.0, rel=1e-3)
    assert (chunks.largest >= chunks.mean).all()
    few = rows_held(TRAFFIC, tokens, chunk, np.full(3, 5.0))
    assert (few <= 5.0).all()


def test_common_beginnings_are_held_once():
    shared = replace(TRAFFIC, shared_prefix=100)
    assert Held.of(shared).decode == pytest.approx(Held.of(TRAFFIC).decode - 100, abs=1.0)
    assert Held.of(shared).common == 100


def test_more_lanes_hide_the_ways_between_stages():
    option = _engine("t4", "t4", "t4", "t4")
    stages = list(zip(option.kinds, option.layers, strict=True))
    latency, each = chain_wires(PROBLEM, option.kinds)
    assert latency > 0
    assert each > 0
    one = np.ones(2)
    slow = steps_of(
        PROBLEM, stages, (10 * latency + 0.5, each), np.array([4.0, 8.0]),
        1000.0 * PAGE_SIZE * one, 256.0 * one, 64.0 * one,
    )  # fmt: skip
    assert slow.per_s[1] > 1.2 * slow.per_s[0]
    assert (slow.per_s <= slow.ideal * (1 + 1e-9)).all()
