"""Nothing unproven leaves: what the search says of a plan is held against the simulator."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest

from tests.unit.search.test_planner import problem
from tutti.plan.job import Job, ScheduleKind
from tutti.search.cutting.build_draft import PipelineCopies, draft_of
from tutti.search.planner import plan
from tutti.search.pricing import simulate_draft
from tutti.search.pricing.simulate_draft import (
    DraftSimulator,
    SearchDisagreementError,
    require_agreement,
    short_lengths,
)
from tutti.search.pricing.unit_tables import Config, Tables
from tutti.search.question.effort import Effort
from tutti.search.question.space import Space
from tutti.search.strategy.coarse_chain import Chain, ScheduleOption
from tutti.search.strategy.draft import Draft, PipelineDraft, ReplicaDraft, StageDraft
from tutti.search.strategy.summary import summary_of
from tutti.search.thresholds import THRESHOLDS

FEW = Effort(candidates=1, most_candidates=1, chains=1, refined=1)
NARROW = Space(tp=(1,), cp=(1,), schedules=(ScheduleKind.ONE_F_ONE_B,), shard=(1,), offload=())


def test_prices_agree_or_it_is_an_error():
    require_agreement("a plan", 1.0, 1.0 + 1e-10, THRESHOLDS.same_price)
    with pytest.raises(SearchDisagreementError, match="a plan: the search says 1, the simulator"):
        require_agreement("a plan", 1.0, 1.0 + 1e-8, THRESHOLDS.same_price)


def test_a_price_that_the_search_made_up_is_an_error():
    true = DraftSimulator.whole_estimate

    def flattering(self, played):
        found = true(self, played)
        return replace(found, step_seconds=0.999 * found.step_seconds)

    with (
        mock.patch.object(DraftSimulator, "whole_estimate", flattering),
        pytest.raises(SearchDisagreementError, match="the search says"),
    ):
        plan(problem(space=NARROW), effort=FEW, compare=False)


def test_a_schedule_that_fails_its_check_does_not_leave():
    with (
        mock.patch.object(simulate_draft, "check_schedule", return_value=["a rank waits for ever"]),
        pytest.raises(SearchDisagreementError, match="a rank waits for ever"),
    ):
        plan(problem(space=NARROW), effort=FEW, compare=False)


def long_step() -> tuple[DraftSimulator, Draft]:
    asked = problem(job=Job(sequence_length=2048, global_batch=8192))
    tables = Tables(asked)
    chain = Chain(
        configs=(Config("a100"),), stages=(4,), copies=4, sequences=1,
        schedule=ScheduleOption(kind=ScheduleKind.ONE_F_ONE_B), shard=1, pace=1.0, fill=0.0,
        closing=0.0,
    )  # fmt: skip
    draft = draft_of(tables, (PipelineCopies(chain=chain, copies=4, micro_batches=2048),))
    assert draft is not None
    return DraftSimulator(tables), draft


def test_the_beginning_of_a_long_step_tells_its_length():
    simulator, draft = long_step()
    short = simulator.quick(draft)
    assert short.whole is None
    made = simulator.plan_of(draft)
    whole = simulator.price(made)
    require_agreement(summary_of(made), short.seconds, whole.step_seconds, 0.002)


def test_a_short_step_is_simulated_whole_and_once():
    simulator, draft = long_step()
    brief = replace(draft, pipelines=(replace(draft.pipelines[0], micro_batches=64),))
    job = replace(simulator.tables.problem.job, global_batch=brief.sequences)
    simulator.tables = simulator.tables.for_problem(replace(simulator.tables.problem, job=job))
    found = simulator.quick(brief)
    assert simulator.simulated == 1
    assert found.whole is not None
    assert found.whole[1].step_seconds == found.seconds


def interleaved(micro_batches: int, stages: int = 4) -> Draft:
    replica = ReplicaDraft(config=Config("a100"))
    cut = tuple(((s, s + 1), (s + stages, s + stages + 1)) for s in range(stages))
    return Draft(
        pipelines=(
            PipelineDraft(
                micro_batches=micro_batches,
                stages=tuple(StageDraft(units=units, replicas=(replica,)) for units in cut),
            ),
        ),
        schedule=ScheduleKind.INTERLEAVED,
    )


@pytest.mark.parametrize(
    ("micro_batches", "stages", "group"),
    [(64, 4, 4), (65, 4, 5), (127, 4, 5), (251, 16, 17), (58, 14, 15)],
)
def test_a_shortened_interleaved_step_has_groups_of_the_same_length(micro_batches, stages, group):
    (shorter,), (longer,) = short_lengths(interleaved(micro_batches, stages))
    average = micro_batches / (micro_batches // stages)
    for count in (shorter, longer):
        groups = count // stages
        assert -(-count // groups) == group
        assert average <= count / groups < average + 1 / groups
    assert shorter < longer <= 4 * group


@pytest.mark.parametrize("batch", [8192, 128])  # of one the beginning is simulated, one whole
def test_pipelines_of_unlike_pace_end_together_once_evened(batch):
    asked = problem(job=Job(sequence_length=2048, global_batch=batch))
    tables = Tables(asked)
    chains = [
        Chain(
            configs=(Config(pool),), stages=(2,), copies=4, sequences=1,
            schedule=ScheduleOption(kind=ScheduleKind.ONE_F_ONE_B), shard=1, pace=1.0, fill=0.0,
            closing=0.0,
        )
        for pool in ("h100", "a100")
    ]  # fmt: skip
    counts = (batch // 8 + 1, batch // 8 - 1)  # alike they would be one pipeline
    parts = tuple(
        PipelineCopies(chain=c, copies=4, micro_batches=n)
        for c, n in zip(chains, counts, strict=True)
    )
    draft = draft_of(tables, parts)
    assert draft is not None
    simulator = DraftSimulator(tables)
    found = simulator.quick(draft)
    assert (found.whole is None) == (batch == 8192)
    evened = found.evened
    assert evened.draft.sequences == batch
    fast, slow = (pipeline.micro_batches for pipeline in evened.draft.pipelines)
    assert fast > 1.5 * slow
    made = simulator.plan_of(evened.draft)
    whole = simulator.price(made)
    require_agreement(summary_of(made), evened.seconds, whole.step_seconds, 0.03)
    assert whole.step_seconds < 0.8 * found.seconds
    ends = [runner.end() for runner in simulator.quick(evened.draft).runners]
    assert max(ends) - min(ends) < 2.0 * max(runner.pace_s for runner in found.runners)
