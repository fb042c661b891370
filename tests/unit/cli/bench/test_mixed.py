"""What `tutti bench mixed` runs is what its rows say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tutti.cli.bench.mixed import INSTANCES, LAYERS, Runs


@pytest.mark.parametrize("name", ["shares 3:1", "shares 4:2:1", "cuts 3:1"])
def test_the_planner_shares_or_cuts_unevenly(name: str, tmp_path: Path) -> None:
    instance = INSTANCES[name]
    runs = Runs(instance, tmp_path, steps=2)
    job = runs.job(instance.batch, use_all_pools=True)
    uniform = runs.job(instance.batch, use_all_pools=True, uniform=True)
    speedup = uniform.predicted().step_seconds / job.predicted().step_seconds
    assert 0.85 * instance.ideal < speedup <= 1.05 * instance.ideal
    pipelines = job.plan.pipelines
    if name.startswith("shares"):
        assert all(len(p.stages) == 1 for p in pipelines)
        shares = sorted(p.sequences for p in pipelines)
        assert shares == ([8, 24] if name == "shares 3:1" else [12, 24, 48])
    else:
        (pipeline,) = pipelines
        units = sorted(stage.num_units for stage in pipeline.stages)
        assert len(units) == 2
        assert units[1] > 0.65 * LAYERS


def test_a_block_is_short_enough_to_be_slept(tmp_path: Path) -> None:
    instance = INSTANCES["shares 3:1"]
    job = Runs(instance, tmp_path, steps=2).job(instance.batch, use_all_pools=True)
    estimate = job.predicted()
    slowest = max(float(c.seconds.max()) for c in estimate.priced.costs.classes)
    assert slowest / LAYERS < 0.020  # seconds, of one pass over one block
