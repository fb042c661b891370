"""Published runs as plans: the product's estimate beside the vectorised formulas, and beside them.

`tutti validate` scores the estimate. The formulas serve calibration and coarse search: here they
are held against it, run by run.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tutti.cost.calibration.rows import Cells
from tutti.cost.calibration.runs import Run, run_of
from tutti.cost.calibration.table import RunTable, load_runs
from tutti.cost.calibration.validate import shipped_constants
from tutti.cost.constants import Constants
from tutti.cost.step import price
from tutti.plan.job import ScheduleKind
from tutti.schedule.instruction import Op
from tutti.simulate.published_runs import PlanPredictor, published_plan

RUNS = Path(__file__).parents[4] / "shared" / "data" / "published_runs.csv"
published = pytest.mark.skipif(
    not RUNS.is_file(), reason="the published runs are not beside this checkout"
)

ROW = {
    "id": "lab-1", "group": "lab", "model": "own", "chip": "A100", "n_gpus": "16", "seq": "2048",
    "gbs": "64", "step_time_s": "10", "layers": "24", "hidden": "2048", "heads": "16",
    "ffn": "8192", "gated_mlp": "0", "vocab": "51200", "tp": "2", "pp": "2", "dp": "4", "mbs": "2",
    "shard": "ddp", "recompute": "full", "flash_attn": "1", "precision": "bf16",
}  # fmt: skip


def run_with(**changes: str) -> Run:
    return run_of(Cells({**ROW, **changes}))


def closed_form(run: Run, constants: Constants) -> float:
    table = RunTable.of([run])
    found = price(table.shape, table.strategy, table.machine, constants).step_seconds
    return float(np.ravel(found)[0])


def test_a_run_is_laid_out_as_its_columns_say() -> None:
    run = run_with(vpp="3", shard="distopt", seq_par="1")
    found = published_plan(run)
    (pipeline,) = found.plan.pipelines
    assert len(pipeline.stages) == 2
    assert [len(stage.units) for stage in pipeline.stages] == [3, 3]
    assert found.plan.job.schedule is ScheduleKind.INTERLEAVED
    (replica,) = pipeline.stages[0].replicas
    assert (replica.tp, replica.cp, replica.count, replica.sequences) == (2, 1, 4, 2)
    assert replica.sequence_parallel
    assert replica.recompute.full
    assert (pipeline.micro_batch, pipeline.micro_batches) == (8, 8)
    assert {rule.shard_level for rule in found.plan.synchronisation} == {1}
    assert found.cluster.num_chips == 16
    assert found.model.num_layers == 24
    assert found.model.vocab == 51200


def test_what_no_plan_says_is_a_fact_of_the_software() -> None:
    plain, more = run_with(flash_attn="1"), run_with(flash_attn="0", notes="compile, async TP")
    assert published_plan(plain).kernels.fused_attention
    kernels = published_plan(more).kernels
    assert not kernels.fused_attention
    assert kernels.compiled
    assert kernels.asynchronous_tp
    assert not kernels.split_backward
    assert kernels.recomputed["full"] == (1.0, 1.0, 1.0, 1.0)
    times = [published_plan(run).estimate(Constants()).step_seconds for run in (plain, more)]
    assert times[1] > times[0]  # scores through memory cost more than a compiler wins


def test_a_stack_that_reduces_afterwards_is_planned_so() -> None:
    run = run_with()
    late = replace(run, source=replace(run.source, overlaps_gradients=False))
    found = published_plan(late).estimate(Constants())
    for index, rank_class in enumerate(found.schedule.classes):
        start = found.result.start[found.result.program.span(index)]
        end = found.result.end[found.result.program.span(index)]
        ops = np.array([entry.op for entry in rank_class.instructions])
        passes = np.isin(ops, [Op.FORWARD, Op.RECOMPUTE, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT])
        reductions = ops == Op.REDUCE_GRADIENTS
        assert reductions.any()
        assert start[reductions].min() >= end[passes].max() - 1e-12
    early = published_plan(run).estimate(Constants())
    assert found.step_seconds > early.step_seconds


def test_a_run_that_is_no_plan_is_refused_with_a_reason() -> None:
    predictor = PlanPredictor()
    runs = [run_with(), run_with(id="lab-2", pp="2", vpp="20", layers="24")]
    found = predictor(RunTable.of(runs), Constants())
    assert np.isfinite(found).tolist() == [True, False]
    assert predictor.refused == {
        "lab-2": "no Plan says what it did: 40 stages, but the model has only 24 layers"
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"tp": "1", "pp": "1", "dp": "16", "gbs": "64"},
        {"tp": "8", "pp": "1", "dp": "2", "seq_par": "1"},
        {"tp": "1", "pp": "1", "dp": "16", "shard": "zero3", "recompute": "none"},
        {"tp": "2", "pp": "4", "dp": "2", "gbs": "128"},
        {"tp": "2", "pp": "2", "dp": "4", "vpp": "3", "gbs": "256"},
        {"tp": "2", "pp": "1", "dp": "4", "cp": "2"},
    ],
)
def test_the_formulas_follow_the_estimate(changes: dict[str, str]) -> None:
    run, constants = run_with(**changes), Constants()
    found = published_plan(run).estimate(constants).step_seconds
    assert closed_form(run, constants) == pytest.approx(found, rel=0.08)


@published
def test_the_formulas_follow_the_estimate_of_published_runs() -> None:
    """Sixty runs drawn from all groups; no formula may drift away from what the product says."""
    table, _, _ = load_runs(RUNS)
    groups: dict[str, list[int]] = defaultdict(list)
    for i, run in enumerate(table.runs):
        if run.strategy["micro_batches"] * run.strategy["pp"] * run.strategy["vpp"] < 2000:
            groups[run.group].append(i)
    random = np.random.default_rng(20)
    ratios = []
    for rows in groups.values():
        for i in random.choice(rows, size=min(6, len(rows)), replace=False):
            run = table.runs[int(i)]
            constants = shipped_constants(run)
            found = published_plan(run).estimate(constants).step_seconds
            ratios.append(found / closed_form(run, constants))
    assert len(ratios) > 50
    assert abs(np.median(ratios) - 1.0) < 0.02
    assert np.mean(np.abs(np.array(ratios) - 1.0)) < 0.03
    assert np.max(np.abs(np.array(ratios) - 1.0)) < 0.20


@published
def test_dense_b200_runs() -> None:
    table, _, _ = load_runs(RUNS)
    time_errors, memory_errors = [], []
    for run in table.of_groups(["SimuMax-B200"]).runs:
        if run.shape["experts"] or run.strategy["cp"] > 1 or run.memory_bytes is None:
            continue
        found = published_plan(run).estimate(shipped_constants(run))
        time_errors.append(abs(found.step_seconds / run.step_seconds - 1))
        overheads = found.priced.overheads
        tensors = found.tightest.total - found.tightest.runtime + overheads.workspace_bytes
        memory_errors.append(abs(tensors / run.memory_bytes - 1))
    assert len(time_errors) >= 10
    assert np.mean(time_errors) < 0.06
    assert np.mean(memory_errors) < 0.03
