"""What a pool's calibration has in common with it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tutti.cost.calibration.intervals import Known, shipped_widths
from tutti.cost.calibration.shipped import shipped_calibrations
from tutti.cost.plan.sources import Sources
from tutti.hardware.cluster import Cluster
from tutti.search.ask_from_values import make_problem
from tutti.search.planner import plan
from tutti.search.question.effort import Effort
from tutti.simulate.estimate import estimate

MEGATRON = next(c for c in shipped_calibrations() if c.name == "megatron-a100")


def test_only_the_caller_s_own_runs_are_of_his_cluster() -> None:
    pool = next(p for p in Cluster.load("small-mixed").pools if p.chip.name == "A100-80")
    own = replace(MEGATRON, name="own", date="2026-01-01")
    assert Sources(calibrations=(own,)).known(pool, own) is Known.CLUSTER
    # a search pins those that ship: they are still of other people's clusters
    assert Sources(calibrations=(MEGATRON,)).known(pool, MEGATRON) is Known.CHIP
    named = replace(pool, stack="Megatron-LM 0.8")
    assert Sources().known(named, MEGATRON) is Known.STACK
    assert Sources().known(pool, None) is Known.NOTHING


def test_a_plan_and_its_prediction_have_one_interval() -> None:
    cluster = Cluster.load("small-mixed")
    problem = make_problem("smollm2-360m", cluster, sequence_length=1024, global_batch=64)
    best = plan(problem, compare=False, effort=Effort(last_mile=0)).best
    again = estimate(best.plan)
    assert again.interval == pytest.approx(best.estimate.interval, rel=1e-9)
    low, high = again.interval
    assert low < again.step_seconds < high
    assert again.half_width >= shipped_widths().chip, "nobody measured one of its chips"
