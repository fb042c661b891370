"""The reduction that closes a step at levels 2 and 3: shards meet the shards that overlap them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tutti.cost.plan.final_reduction import closing_meeting, shard_runs
from tutti.models.parameters import ParameterClass
from tutti.plan.chips import ChipSet
from tutti.plan.plan import Replica, Share, Stage, Synchronisation

RULE = Synchronisation(units=(0, 4), shard_level=2)


def holder(pipeline: int, node: int, copies: int, **fields: int) -> tuple[int, int, Stage]:
    width = fields.get("tp", 1) * fields.get("cp", 1)
    chips = ChipSet.of(f"a/{node}/0-{copies * width - 1}")
    return (
        pipeline,
        0,
        Stage(units=((0, 4),), replicas=(Replica(chips=chips, count=copies, **fields),)),
    )


def meeting(*holders, place=(0, 0, 0), rule=RULE, kind=ParameterClass.DENSE):
    return closing_meeting(shard_runs(holders, kind, rule), place)


def test_equal_pipelines_meet_one_to_one():
    found = meeting(holder(0, 0, 4), holder(1, 1, 4))
    assert found is not None
    assert found.pieces == 1
    assert [str(chip) for chip in found.chips] == ["a/0/0", "a/1/0"]


@pytest.mark.parametrize(("mine", "theirs", "pieces"), [(2, 4, 2), (4, 2, 1), (1, 8, 8), (3, 4, 2)])
def test_a_shard_falls_into_the_pieces_that_others_cut(mine, theirs, pieces):
    found = meeting(holder(0, 0, mine), holder(1, 1, theirs))
    assert found is not None
    assert found.pieces == pieces
    assert len(found.chips) == 2


def test_three_pipelines_and_ragged_shares():
    found = meeting(holder(0, 0, 1), holder(1, 1, 2), holder(2, 2, 4))
    assert found is not None
    assert (found.pieces, len(found.chips)) == (4, 3)
    shares = (
        Share(pipeline=0, stage=0, replica=0, weight=1),
        Share(pipeline=1, stage=0, replica=0, weight=0),
    )
    ragged = replace(RULE, shares=shares)
    assert meeting(holder(0, 0, 2), holder(1, 1, 2), place=(1, 0, 0), rule=ragged) is None
