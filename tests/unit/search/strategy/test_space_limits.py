"""Which strategies a Space leaves, seen on whole drafts and plans."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.search.test_planner import problem
from tutti.models.load import load_model
from tutti.plan.job import ScheduleKind
from tutti.plan.plan import Recompute
from tutti.search.pricing.unit_tables import Config, Tables
from tutti.search.question.space import Space
from tutti.search.strategy.draft import Draft, PipelineDraft, ReplicaDraft, StageDraft, to_plan
from tutti.search.strategy.space_limits import draft_keeps, plan_keeps, uses_enough

UNITS = ((0, 14),)  # of the problem's model


def pipeline(*groups: tuple[str, int, int], count: int = 2):
    """One stage of (pool, copies, sequences) groups."""
    replicas = tuple(
        ReplicaDraft(config=Config(pool, sequences=sequences), copies=copies)
        for pool, copies, sequences in groups
    )
    return PipelineDraft(micro_batches=count, stages=(StageDraft(units=UNITS, replicas=replicas),))


ALIKE = Draft(pipelines=(pipeline(("h100", 8, 1)), pipeline(("a100", 8, 1))))
MIXED = Draft(pipelines=(pipeline(("h100", 8, 2), ("a100", 16, 1)),))
APART = Draft(pipelines=(pipeline(("h100", 8, 1)), pipeline(("a100", 16, 1), count=3)))


def along() -> Draft:
    ends = zip(((0, 6), (6, 14)), ("h100", "a100"), strict=True)
    stages = tuple(
        StageDraft(units=(span,), replicas=(ReplicaDraft(config=Config(pool), copies=8),))
        for span, pool in ends
    )
    return Draft(pipelines=(PipelineDraft(micro_batches=8, stages=stages),))


ALONG = along()
TURNS = replace(
    ALONG,
    schedule=ScheduleKind.INTERLEAVED,
    pipelines=(
        PipelineDraft(
            micro_batches=8,
            stages=tuple(
                replace(stage, units=units)
                for stage, units in zip(
                    ALONG.pipelines[0].stages, (((0, 3), (6, 9)), ((3, 6), (9, 14))), strict=True
                )
            ),
        ),
    ),
)


@pytest.mark.parametrize(
    ("draft", "narrow", "keeps"),
    [
        (ALIKE, {}, True),
        (ALIKE, {"mixed_stages": False}, False),  # written as one pipeline
        (ALIKE, {"uneven_shares": False}, True),
        (ALIKE, {"max_pipelines": 1}, True),
        (MIXED, {"mixed_stages": False}, False),
        (MIXED, {"uneven_shares": False}, False),
        (MIXED, {"mixed_pipelines": False}, True),
        (APART, {"mixed_stages": False}, True),
        (APART, {"max_pipelines": 1}, False),
        (ALONG, {"mixed_pipelines": False}, False),
        (ALONG, {"mixed_stages": False}, True),
        (ALONG, {"idle": False}, False),
    ],
)
def test_a_space_leaves_what_it_says(draft, narrow, keeps):
    asked = problem(space=Space(**narrow))
    assert draft_keeps(draft, asked) is keeps
    tables = Tables(asked)
    made = to_plan(draft, tables.references, asked.job, asked.model, asked.cluster)
    assert plan_keeps(made, asked) is keeps


@pytest.mark.parametrize(
    ("draft", "narrow", "keeps"),
    [
        (ALONG, {"max_stages": 2}, True),
        (ALONG, {"max_stages": 1}, False),
        (ALONG, {"schedules": (ScheduleKind.ZERO_BUBBLE,)}, False),
        (ALIKE, {"schedules": (ScheduleKind.ZERO_BUBBLE,)}, True),  # one stage: no schedule
        (replace(ALONG, shard=1), {"shard": (1, 2)}, True),
        (replace(ALONG, shard=1), {"shard": (3,)}, False),
        (TURNS, {"virtual": (2,)}, True),
        (TURNS, {"virtual": (3,)}, False),
    ],
)
def test_a_plan_made_by_other_rules_keeps_to_degrees_too(draft, narrow, keeps):
    asked = problem(space=Space(**narrow))
    tables = Tables(asked)
    job = replace(asked.job, schedule=draft.schedule)
    made = to_plan(draft, tables.references, job, asked.model, asked.cluster)
    assert plan_keeps(made, asked) is keeps


def test_chips_of_pools_that_may_not_take_part_are_not_missed():
    asked = problem(space=Space(idle=False, pools=("h100",)))
    assert uses_enough({"h100": 8}, asked)
    assert not uses_enough({"h100": 7}, asked)
    assert not uses_enough({"h100": 8}, problem(space=Space(idle=False)))


def test_members_of_an_expert_group_that_recompute_unlike_units_keep_to_no_space():
    sparse = replace(problem(), model=load_model("mixtral-8x7b"))
    units = ((0, sparse.model.num_units),)

    def stage(first: Recompute, second: Recompute, copies: int = 8) -> Draft:
        replicas = tuple(
            ReplicaDraft(config=Config(pool, ep=8), copies=copies, recompute=recompute)
            for pool, recompute in (("h100", first), ("a100", second))
        )
        one = PipelineDraft(micro_batches=4, stages=(StageDraft(units=units, replicas=replicas),))
        return Draft(pipelines=(one,))

    again = Recompute(full=((1, 5),))
    assert draft_keeps(stage(again, again, copies=4), sparse)
    assert not draft_keeps(stage(again, Recompute(), copies=4), sparse)
    assert draft_keeps(stage(again, Recompute()), sparse)  # each group of 8 lies in one pool


@pytest.mark.parametrize(("copies", "whole"), [((4, 4), True), ((8, 8), True), ((2, 8), False)])
def test_a_stage_of_several_pools_has_whole_expert_groups(copies, whole):
    """Ten chips are no group of eight: such a draft once ended the search with an error."""
    sparse = replace(problem(), model=load_model("mixtral-8x7b"))
    replicas = tuple(
        ReplicaDraft(config=Config(pool, ep=8), copies=count)
        for pool, count in zip(("h100", "a100"), copies, strict=True)
    )
    stage = StageDraft(units=((0, sparse.model.num_units),), replicas=replicas)
    one = Draft(pipelines=(PipelineDraft(micro_batches=4, stages=(stage,)),))
    assert draft_keeps(one, sparse) is whole


def test_pipelines_that_would_be_joined_into_unlike_members_are_not_kept():
    sparse = replace(problem(), model=load_model("mixtral-8x7b"))
    units = ((0, sparse.model.num_units),)
    pipelines = tuple(
        PipelineDraft(
            micro_batches=4,
            stages=(
                StageDraft(
                    units=units,
                    replicas=(
                        ReplicaDraft(config=Config(pool, ep=8), copies=4, recompute=recompute),
                    ),
                ),
            ),
        )
        for pool, recompute in (("h100", Recompute(full=((1, 3),))), ("a100", Recompute()))
    )
    assert not draft_keeps(Draft(pipelines=pipelines), sparse)
    assert draft_keeps(Draft(pipelines=pipelines, shard=2), sparse)  # these stay apart
