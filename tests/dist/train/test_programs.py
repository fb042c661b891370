"""A step on local ranks runs the collective programs that its Plan records, group by group."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.dist.train.jobs import traced
from tests.support.any_plan import PLANS
from tests.support.features import drawn_plans
from tests.support.rank_pool import RankPool
from tests.support.training import in_fp32
from tutti.cost.plan.record_programs import record_collectives
from tutti.plan.collectives import AUTO
from tutti.plan.plan import CollectiveChoice, Plan, RankMap
from tutti.ranks.clocks import Offset
from tutti.schedule.schedule import build_schedule
from tutti.simulate.measured import CollectiveRun, read_measured, write_measured
from tutti.simulate.program import compile_schedule
from tutti.train.run.tracing import RankSpans, joined

MOST_RANKS = 6
NUM_DRAWN = 10
RECORDED = ("gradients", "parameters", "boundary")  # what the cost model prices as programs


def recorded(plan: Plan) -> Plan:
    return record_collectives(replace(in_fp32(plan, "adamw"), collectives=()))


def trace_of(pool: RankPool, plan: Plan, folder: Path) -> tuple[CollectiveRun, ...]:
    """Return what a trace file of the plan's first step says."""
    found = pool.meet(traced, plan.num_ranks, plan, timeout_s=120.0)
    ranks = [RankSpans.from_document(value) for value in found]
    program = compile_schedule(build_schedule(plan))
    step = joined(1, ranks, {own.kernel: Offset(0.0, 0.0) for own in ranks})
    write_measured(folder / "trace.json", program, step)
    return read_measured(folder / "trace.json", program).collectives


def entries_for(plan: Plan, run: CollectiveRun) -> Iterator[CollectiveChoice]:
    """Yield what the plan says for the group of a run, by rising size; written out once more."""
    cluster, places = plan.cluster.cluster, RankMap(plan)
    assert cluster is not None
    chips = [places.place(rank).chip for rank in run.ranks]
    pools = {chip.pool for chip in chips}
    islands = set()
    for chip in chips:
        slots = cluster.pool(chip.pool).node.islands_or_singles
        island = next(i for i, own in enumerate(slots) if chip.slot in own)
        islands.add((chip.pool, chip.node, island))
    said = (
        choice
        for choice in plan.collectives
        if (choice.use, choice.operation) == (run.use, run.operation)
        and set(choice.pools) == pools
        and choice.ranks == len(chips)
        and choice.islands == len(islands)
    )
    return iter(sorted(said, key=lambda choice: choice.max_bytes or math.inf))


def named(plan: Plan) -> set[CollectiveChoice]:
    """Return the entries that name a program."""
    return {choice for choice in plan.collectives if choice.algorithm != AUTO}


def check(pool: RankPool, plan: Plan, folder: Path) -> set[CollectiveChoice]:
    """Hold every run against the Plan; return the entries that ran."""
    ran: set[CollectiveChoice] = set()
    for run in trace_of(pool, plan, folder):
        said = next(
            (c for c in entries_for(plan, run) if run.bytes <= (c.max_bytes or math.inf)), None
        )
        if said is None or said.algorithm == AUTO:
            assert run.by in ("cost", "caller"), run
            continue
        assert run.use in RECORDED
        assert (run.by, run.algorithm, run.chunks) == ("plan", said.algorithm, said.chunks), run
        ran.add(said)
    return ran


@pytest.mark.parametrize(
    "name",
    [
        "unequal shares on unlike chips",
        "three stages, unlike widths",
        "sequence parallel into plain tensor parallel",
        "tied in one place, level 3",
        "pipelines that cut differently",
        "pipelines that shard inside",
        "experts over tensor and data parallel",
        "two key-value heads for four ranks, sharded",
    ],
)
def test_what_ran_is_what_the_plan_records(pool: RankPool, tmp_path: Path, name: str) -> None:
    plan = recorded(PLANS[name])
    assert plan.collectives
    assert check(pool, plan, tmp_path) == named(plan)


def test_drawn_plans_run_what_they_record(pool: RankPool, tmp_path: Path) -> None:
    for plan in map(recorded, drawn_plans(NUM_DRAWN, MOST_RANKS, examples=8 * NUM_DRAWN)):
        assert check(pool, plan, tmp_path) == named(plan), plan


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_drawn_plans_run_what_they_record(pool: RankPool, tmp_path: Path) -> None:
    for plan in map(recorded, drawn_plans(100, MOST_RANKS)):
        assert check(pool, plan, tmp_path) == named(plan), plan
