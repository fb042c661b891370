"""Checkpoints of real processes: saved in the background of one plan, gone on with on another."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from tests.support.checkpointing import whole
from tests.support.rank_checkpointing import Ran, run_processes
from tests.support.rank_pool import RankPool
from tests.unit.train.checkpoint.test_any_plan import DENSE, SPARSE, of_job
from tutti.plan.plan import Plan

PLANS = {
    **{f"dense, {name}": of_job(plan, "fp32", batch=6) for name, plan in DENSE.items()},
    **{f"sparse, {name}": of_job(plan, "fp32", batch=4) for name, plan in SPARSE.items()},
}
ALWAYS = {
    ("dense, levels 2 and 3, pipelines that shard inside", "dense, unequal pipelines"),
    ("sparse, experts over tensor and data parallel", "sparse, experts shared out unequally"),
}
PAIRS = [
    pytest.param(*pair, marks=() if pair in ALWAYS else pytest.mark.slow, id=" → ".join(pair))
    for pair in itertools.permutations(PLANS, 2)
    if pair[0].split(",")[0] == pair[1].split(",")[0]
]


def together(plan: Plan, ranks: list[Ran]) -> dict[str, torch.Tensor]:
    assert plan.model.spec is not None
    parts = [[(key, cut, torch.from_numpy(v)) for key, cut, v in one.kept] for one in ranks]
    return whole(plan.model.spec, parts)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_run_goes_on_under_another_plan(
    pool: RankPool, first: str, second: str, tmp_path: Path
) -> None:
    before, after = PLANS[first], PLANS[second]
    ran = run_processes(pool, before, tmp_path, steps=4, save_after=2)
    assert all([saved.problem for saved in one.saves] == [""] for one in ran)
    loaded = run_processes(pool, after, tmp_path, steps=0)
    state, found = together(before, ran), together(after, loaded)
    assert found.keys() == state.keys()
    for key, value in state.items():
        assert torch.equal(found[key], value), key
    went_on = run_processes(pool, after, tmp_path, steps=2)
    assert {one.first for one in went_on} == {2}
    assert went_on[0].losses == pytest.approx(ran[0].losses[2:], rel=1e-5)
    same = run_processes(pool, before, tmp_path, steps=2)
    assert same[0].losses == ran[0].losses[2:]
