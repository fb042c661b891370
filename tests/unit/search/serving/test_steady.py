"""Rates that are promised are those of simulations of engines alone; bounds rest on them, too."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.unit.search.serving.test_long_run import PROBLEM, TRAFFIC, _engine
from tests.unit.search.serving.test_plan_serving import _options, _problem
from tutti.cost.measured.chip import MeasuredChip
from tutti.hardware.chip import Dtype
from tutti.hardware.profile import Profile
from tutti.models.load import load_model
from tutti.plan.serving import Role, Service
from tutti.search.serving import rated
from tutti.search.serving.build_plan import plan_of_one
from tutti.search.serving.flows import solve_flows
from tutti.search.serving.kept_rate import largest_kept
from tutti.search.serving.rated import RatedEngines
from tutti.search.serving.steady import is_quick, limits_of, steady_rate
from tutti.simulate.serving.requests import Requests, draw
from tutti.simulate.serving.run import Deployment, simulate_serving


@pytest.mark.parametrize("kept", [0.3, 1.0, 1.7, 60.0])
@pytest.mark.parametrize("guess", [0.5, 1.0, 2.0])
def test_the_largest_kept_rate_is_found(kept, guess):
    tried = []

    def keeps(rate):
        tried.append(rate)
        return rate <= kept

    found = largest_kept(keeps, guess, close=1.02)
    assert kept / 1.02 <= found <= kept
    assert found in tried
    assert len(tried) <= 20
    below = largest_kept(keeps, guess, close=1.02, most=0.2)
    assert below == 0.2
    assert largest_kept(keeps, guess, close=1.02, least=1.1 * kept) == 0.0
    assert largest_kept(lambda rate: False, guess, close=1.02) == 0.0


@pytest.mark.parametrize("pools", [("t4", "t4", "l4", "l4"), ("l4", "l4")])
def test_a_steady_rate_is_that_of_a_long_run(pools):
    option = _engine(*pools)
    steady = steady_rate(PROBLEM, option, copies=1, guess=option.rate)
    long = simulate_serving(
        Deployment.of(plan_of_one(PROBLEM, option)), draw(TRAFFIC, 40 * option.slots, 3)
    )
    assert steady == pytest.approx(long.output_rate / TRAFFIC.output.expected, rel=0.04)


def test_a_decode_engine_alone_gets_requests_with_their_keys():
    problem = _problem()
    option = next(o for o in _options(problem) if o.role is Role.DECODE and o.num_chips == 1)
    deployment = Deployment.of(plan_of_one(problem, option))
    several = Requests(
        times=np.zeros(3), prompts=np.array([400, 40, 9]), outputs=np.array([30, 1, 20])
    )
    result = simulate_serving(deployment, several)
    assert (result.first_s == 0.0).all()
    assert result.whole_s[1] == 0.0  # its one token came with its keys
    assert result.engines[0].steps == 29
    assert result.engines[0].tokens_per_step == result.engines[0].rows_per_step


def test_roles_miss_their_own_limits():
    problem = _problem()
    limits = problem.service.limits
    assert limits_of(problem, Role.BOTH) == limits
    prefill, decode = (limits_of(problem, role) for role in (Role.PREFILL, Role.DECODE))
    assert (prefill.per_token_s, decode.first_token_s) == (None, None)
    assert prefill.share * decode.share == pytest.approx(limits.share)


def test_mixtures_promise_what_was_simulated():
    problem = replace(PROBLEM, service=Service(traffic=TRAFFIC))
    options = _options(problem, (Role.BOTH,))
    engines = RatedEngines(problem, options)
    mixture = engines.solve()
    assert mixture is not None
    assert 0 < engines.num_simulated < len(options)
    assert mixture.bound >= mixture.rate * (1 - 1e-6)
    for option, _ in mixture.engines:
        steady = steady_rate(problem, option, copies=1, guess=option.rate)
        assert option.rate == pytest.approx(steady, rel=1e-9)
    closed = solve_flows(problem, options)
    assert closed is not None
    assert 0.8 * closed.rate < mixture.rate < 1.2 * closed.rate


def test_closed_forms_stand_where_simulations_are_slow():
    problem = _problem()
    assert is_quick(problem)
    shared = replace(problem.service.traffic, shared_prefix=50)
    assert not is_quick(replace(problem, service=replace(problem.service, traffic=shared)))
    assert not is_quick(replace(problem, model=load_model("gemma-3-1b")))
    measured = {"h20": MeasuredChip(Profile.find("h200"), Dtype.BF16)}
    assert not is_quick(replace(problem, measured=measured))
    slow = replace(problem, service=replace(problem.service, traffic=shared))
    options = _options(slow)
    ours, closed = RatedEngines(slow, options).solve(), solve_flows(slow, options)
    assert ours is not None
    assert closed is not None
    assert ours.rate == closed.rate


def test_engines_that_keep_no_limit_are_left_out(monkeypatch):
    problem = _problem()

    def only_both(problem, option, *, copies, guess):
        return option.rate if option.role is Role.BOTH else 0.0

    monkeypatch.setattr(rated, "steady_rate", only_both)
    mixture = RatedEngines(problem, _options(problem)).solve()
    assert mixture is not None
    assert {option.role for option, _ in mixture.engines} == {Role.BOTH}
