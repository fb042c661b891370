"""Small steps from a simulated strategy: never worse, never more work than allowed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.instances import with_memory
from tests.unit.search.test_planner import problem
from tutti.plan.job import Job, ScheduleKind
from tutti.search.cutting.build_draft import PipelineCopies, cuts_of, draft_of
from tutti.search.cutting.local_search import Polish
from tutti.search.pricing.simulate_draft import DraftSimulator, free_by_chain
from tutti.search.pricing.unit_tables import Config, Tables
from tutti.search.strategy.coarse_chain import Chain, ScheduleOption

ENOUGH = 10**7


def tight() -> Tables:
    """A problem in which activations do not all fit."""
    asked = problem(job=Job(sequence_length=2048, global_batch=128))
    return Tables(with_memory(asked, {pool.name: 8e9 for pool in asked.cluster.pools}))


@pytest.fixture(scope="module")
def tables() -> Tables:
    return tight()


def chain(virtual: int) -> Chain:
    kind = ScheduleKind.INTERLEAVED if virtual > 1 else ScheduleKind.ONE_F_ONE_B
    return Chain(
        configs=(Config("h100", sequences=2), Config("a100", sequences=2)), stages=(2, 2),
        copies=4, sequences=2, schedule=ScheduleOption(kind=kind, virtual=virtual), shard=1,
        pace=1.0, fill=0.0, closing=0.0,
    )  # fmt: skip


def parts_of(virtual: int) -> tuple[PipelineCopies, ...]:
    return (PipelineCopies(chain=chain(virtual), copies=4, micro_batches=16),)


@pytest.mark.parametrize("virtual", [1, 2])
def test_memory_that_is_left_over_is_used(tables, virtual):
    parts, simulator = parts_of(virtual), DraftSimulator(tables)
    spared = {(0, s): 1e9 for s in range(4)}
    wasteful = draft_of(tables, parts, spared=spared)
    assert wasteful is not None
    start = replace(simulator.quick(wasteful), spared=spared)
    assert start.fits
    left = free_by_chain(start, parts)
    assert left is not None
    assert min(left.values()) > 1e9
    found = Polish(simulator, ENOUGH).improved(parts, start)
    assert found.fits
    assert found.seconds < start.seconds
    after = free_by_chain(found, parts)
    assert after is not None
    assert min(after.values()) < min(left.values())


@pytest.mark.parametrize("virtual", [1, 2])
def test_a_bad_cut_gets_better_step_by_step(tables, virtual):
    parts, simulator = parts_of(virtual), DraftSimulator(tables)
    (cut,) = cuts_of(tables, parts) or ()
    simulated = simulator.parts(parts)
    assert simulated is not None
    found = Polish(simulator, ENOUGH).improved(parts, simulated)
    assert found.fits
    assert found.seconds <= simulated.seconds
    again = Polish(DraftSimulator(tables), ENOUGH).improved(parts, simulated)
    assert (again.draft, again.seconds) == (found.draft, found.seconds)  # nothing is left to chance
    assert cut.ranges[-1][1] == tables.problem.model.num_units


def test_work_is_counted(tables):
    parts, simulator = parts_of(2), DraftSimulator(tables)
    simulated = simulator.parts(parts)
    assert simulated is not None
    before = simulator.simulated
    assert Polish(simulator, 0).improved(parts, simulated) is simulated
    assert simulator.simulated == before
    polish = Polish(simulator, 1)
    polish.improved(parts, simulated)
    assert simulator.simulated <= before + 1
    assert polish.spent == (simulator.simulated > before)
