"""The best uniform plan, held against all of them simulated."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace

import pytest

from tests.unit.search.test_planner import problem
from tutti.errors import InputError
from tutti.hardware.cluster import Cluster
from tutti.models.plain_decoder import plain_gpt
from tutti.plan.check import check_plan
from tutti.plan.job import Job, ScheduleKind
from tutti.plan.uniform import Degrees, uniform_plan
from tutti.search.answer import uniform_baseline
from tutti.search.pricing.simulate_draft import DraftSimulator
from tutti.search.pricing.unit_tables import Tables
from tutti.search.question.space import Problem, Space

SPACES = {
    "all": Space(),
    "no schedule but one": Space(schedules=(ScheduleKind.ONE_F_ONE_B,)),
    "tensor parallel": Space(tp=(2, 4)),
}


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
@pytest.mark.parametrize("batch", [16, 64])
def test_no_uniform_plan_is_faster_by_more_than_prices_err(space, batch):
    asked = problem(space=space)
    asked = replace(asked, job=replace(asked.job, global_batch=batch))
    tables = Tables(asked)
    simulator = DraftSimulator(tables)
    found = uniform_baseline.best_uniform(tables, simulator)
    assert not isinstance(found, str)
    layouts = uniform_baseline.full_layouts(tables)
    plans = [uniform_baseline._plan(tables, layout) for layout in layouts]
    every = [simulator.price(plan) for plan in plans if plan is not None]
    fitting = [estimate.step_seconds for estimate in every if estimate.fits]
    assert len(fitting) > 3
    assert found[1].step_seconds <= 1.002 * min(fitting)


ODD = {
    "seven chips": "[{name: a800, node: HGX-A800, chips_per_node: 7}]",
    "five, three and six": "[{name: a800, node: HGX-A800, chips_per_node: 5},"
    " {name: v100, node: DGX-1-V100-32, chips_per_node: 3},"
    " {name: l40s, node: PCIe-8xL40S, chips_per_node: 6}]",
    "one slow pool": "[{name: h100, node: HGX-H100, nodes: 1},"
    " {name: t4, node: PCIe-4xT4, chips_per_node: 3}]",
}


def obvious(asked):
    """Yield the plans that come to mind: each pool, or all chips, with plain degrees."""
    model, cluster, job = asked.model, asked.cluster, asked.job
    uses = [{pool.name: pool.num_chips} for pool in cluster.pools]
    uses.append({pool.name: pool.num_chips for pool in cluster.pools})
    for chips, tp, pp, shard in itertools.product(uses, (1, 2, 8), (1, 3), (1, 3)):
        for dp in range(sum(chips.values()) // (tp * pp), 0, -1):
            for count, recompute in itertools.product((1, 4), ("none", "full")):
                degrees = Degrees(
                    tp=tp, pp=pp, dp=dp, shard=shard if dp > 1 else 0, micro_batch=count,
                    sequence_parallel=tp > 1, recompute=recompute,
                )  # fmt: skip
                with contextlib.suppress(InputError):
                    yield uniform_plan(model, cluster, job, degrees, chips)
            if job.global_batch % dp == 0:
                break  # fewer of them are slower


@pytest.mark.parametrize("pools", ODD.values(), ids=ODD)
def test_the_best_uniform_plan_is_no_worse_than_any_obvious_one(pools, tmp_path):
    (tmp_path / "odd.yaml").write_text(f"name: odd\npools: {pools}\n")
    model = plain_gpt(layers=12, hidden=2048, heads=16, vocab=32000, style="llama", name="small")
    job = Job(sequence_length=1024, global_batch=32)
    asked = Problem(model=model, cluster=Cluster.load(tmp_path / "odd.yaml"), job=job)
    tables = Tables(asked)
    simulator = DraftSimulator(tables)
    found = uniform_baseline.best_uniform(tables, simulator)
    assert not isinstance(found, str), found
    every = [simulator.price(plan) for plan in obvious(asked)]
    fitting = [estimate.step_seconds for estimate in every if estimate.fits]
    assert len(fitting) > 3
    assert found[1].step_seconds <= 1.005 * min(fitting)
    assert check_plan(found[0], model, asked.cluster) == []
