"""A real step beside the simulated one: same times give a ratio of one, slower ones more."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.any_plan import PLANS
from tests.support.real_steps import as_measured
from tests.unit.simulate.reference import random_costs
from tutti.report.overlay import overlay_page
from tutti.schedule.instruction import LANES, Lane
from tutti.schedule.listing import OPS
from tutti.schedule.schedule import build_schedule
from tutti.simulate import SimulationResult, simulate
from tutti.simulate.compare import compare_kinds, compare_parts

PLAN = PLANS["three stages, unlike widths"]


@pytest.fixture(scope="module")
def result() -> SimulationResult:
    schedule = build_schedule(PLAN)
    return simulate(schedule, random_costs(schedule, 3))


@pytest.mark.parametrize("slower", [1.0, 2.0])
def test_kinds_and_parts_scale_with_the_real_step(result, slower):
    step = as_measured(result, slower)
    assert step.step_seconds == pytest.approx(slower * result.step_seconds)
    kinds = compare_kinds(result, step)
    assert {kind.op.value for kind in kinds} >= {"Forward", "Send", "Receive", "Step"}
    for kind in kinds:
        assert kind.measured_s == pytest.approx(slower * kind.predicted_s)
        assert kind.lane in Lane
    for pool in compare_parts(result, step):
        assert sum(pool.predicted.values()) == pytest.approx(result.step_seconds)
        assert sum(pool.measured.values()) == pytest.approx(step.step_seconds)


def test_what_is_under_way_at_once_counts_once(result):
    """All of a step's transfers may be outstanding at once: no kind lasts longer than the step."""
    step = as_measured(result)
    ranks = []
    for own in step.ranks:
        beside = np.array([
            LANES[OPS[code]] is not Lane.COMPUTE
            for code in result.program.op[result.program.span(own.rank_class)]
        ])  # fmt: skip
        end = np.where(beside, step.step_seconds, own.end)
        ranks.append(replace(own, start=np.where(beside, 0.0, own.start), end=end))
    for kind in compare_kinds(result, replace(step, ranks=tuple(ranks))):
        if kind.lane is Lane.COMPUTE:
            assert kind.measured_s == pytest.approx(kind.predicted_s)
        else:  # a mean of ranks, some of which may have none
            assert 0 < kind.measured_s <= step.step_seconds * (1 + 1e-9)


def test_pools_are_compared_by_themselves(result):
    step = as_measured(result)
    pools = {own.pool for own in step.ranks}
    for pool in pools:
        own = compare_kinds(result, step, pool)
        assert sum(kind.count for kind in own) > 0
    total = sum(kind.count for kind in compare_kinds(result, step)) * PLAN.num_ranks
    sizes = [len(result.program.op[result.program.span(r.rank_class)]) for r in step.ranks]
    assert total == pytest.approx(sum(sizes))


def test_the_page_draws_both_and_says_the_ratio(result):
    html = overlay_page(result, as_measured(result, 2.0)).html()
    assert "2.000" in html
    assert '"simulated"' in html
    assert '"real"' in html
    for rank in range(PLAN.num_ranks):
        assert f"rank {rank}" in html
