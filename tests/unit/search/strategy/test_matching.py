"""Which chains go together, and how a pool is priced that takes about its share."""

from __future__ import annotations

import numpy as np
import pytest

from tutti.plan.job import ScheduleKind
from tutti.search.coarse.grid import whole_rounds
from tutti.search.pricing.unit_tables import Config
from tutti.search.strategy.coarse_chain import Chain, ScheduleOption
from tutti.search.strategy.matching import matching
from tutti.search.thresholds import THRESHOLDS

ONE, TURNS = ScheduleKind.ONE_F_ONE_B, ScheduleKind.INTERLEAVED


def chain(pool: str, kind: ScheduleKind, *, stages: int = 1, shard: int = 3, pace: float = 2.0):
    return Chain(
        configs=(Config(pool, sequences=2),),
        stages=(stages,),
        copies=512,
        sequences=2,
        schedule=ScheduleOption(kind=kind, virtual=1 if kind is ONE else 4),
        shard=shard,
        pace=pace,
        fill=0.0,
        closing=0.0,
    )


def test_a_single_stage_goes_with_every_schedule_of_its_level():
    whole = chain("a", ONE)
    deep, level = chain("b", TURNS, stages=4), chain("b", ONE, shard=1)
    found = list(matching([[whole], [deep, level, chain("b", ONE)]]))
    assert [tuple(c.schedule.kind for c in chosen) for chosen in found] == [
        (ONE, ONE),
        (TURNS, TURNS),
    ]
    assert found[1][0].schedule.virtual == 1  # its passes are what they were
    assert found[1][1] is deep


def test_deep_chains_of_unlike_schedules_or_levels_do_not_meet():
    first = [chain("a", ONE, stages=2), chain("a", ONE, shard=1)]
    assert not list(matching([first, [chain("b", TURNS, stages=2)]]))


def test_every_schedule_that_any_group_has_is_looked_at_once():
    lists = [[chain("a", ONE)], [chain("b", ONE)], [chain("c", TURNS, stages=2)]]
    assert len(list(matching(lists))) == 1


def test_a_pool_is_not_charged_for_sequences_that_others_can_take():
    own = chain("a", ONE)
    # 2,061 sequences: three rounds of 1,024, or two of them and a bit for the others
    assert own.seconds(2061) == pytest.approx(3 * 2.0 * THRESHOLDS.optimism[3])
    assert own.elastic_seconds(2061) == pytest.approx(
        2 * 2.0 * THRESHOLDS.optimism[3] * 2061 / 2048
    )
    assert own.elastic_seconds(100) == pytest.approx(2.0 * THRESHOLDS.optimism[3] * 100 / 1024)


def test_rounds_are_whole_and_never_none():
    given = np.array([0.2, 1.4, 1.6, 2.0])
    assert whole_rounds(given, elastic=False).tolist() == [1.0, 2.0, 2.0, 2.0]
    assert whole_rounds(given, elastic=True).tolist() == [1.0, 1.0, 2.0, 2.0]
