"""From chains to cuts: who shares states with whom, and what expert groups cost inside a node."""

from __future__ import annotations

import pytest

from tutti.plan.job import ScheduleKind
from tutti.search.build import Part, cuts_of
from tutti.search.chains import Chain, ScheduleOption
from tutti.search.question import make_problem
from tutti.search.settle import Settler
from tutti.search.tables import NONE, Config, Tables


@pytest.fixture(scope="module")
def tables() -> Tables:
    return Tables(make_problem("deepseek-v3", "B1024", sequence_length=4096, global_batch=4096))


def part(config: Config, stages: int, copies: int, micro_batches: int, shard: int = 1) -> Part:
    chain = Chain(
        configs=(config,), stages=(stages,), copies=copies, sequences=config.sequences,
        schedule=ScheduleOption(kind=ScheduleKind.ONE_F_ONE_B), shard=shard,
        pace=1.0, fill=0.0, closing=0.0,
    )  # fmt: skip
    return Part(chain=chain, copies=copies, micro_batches=micro_batches)


def recomputed(tables: Tables, parts: list[Part]) -> int:
    """Blocks that the first part recomputes."""
    cuts = cuts_of(tables, parts)
    assert cuts is not None
    return sum(b - a for done in cuts[0].recompute for a, b in done.full)


def test_pipelines_that_hold_the_same_units_share_their_states(tables):
    own = part(Config("ascend", 2, 2, 8, 1), 32, 2, 300)
    other = part(Config("a800", 2, 2, 8, 1), 32, 4, 600)
    assert recomputed(tables, [own, other]) < recomputed(tables, [own])


def test_what_the_shared_states_leave_room_for_fits(tables):
    sizes = (("a800", 4, 601), ("p800", 2, 585), ("ascend", 2, 261))
    parts = [part(Config(pool, 2, 2, 8, 1), 32, copies, n) for pool, copies, n in sizes]
    found = Settler(tables).parts(parts)
    assert found is not None
    assert found.fits


def test_known_cuts_are_those_that_would_be_made(tables):
    own = part(Config("ascend", 2, 2, 8, 1), 32, 2, 300)
    other = part(Config("a800", 2, 2, 8, 1), 32, 4, 600)
    known: dict = {}
    for parts in ([own], [own, other], [own]):
        assert cuts_of(tables, parts, known=known) == cuts_of(tables, parts)


def test_expert_groups_of_wide_replicas_stay_on_their_island(tables):
    # Eight chips with all experts are one node, whether a replica is one chip or two wide: half the
    # tokens each, half the exchange, not one over NICs.
    narrow, wide = (tables.get(Config("a800", 1, cp, 8, cp)) for cp in (1, 2))
    assert narrow is not None
    assert wide is not None
    block = slice(4, 62)
    assert wide.forward[NONE, block] == pytest.approx(narrow.forward[NONE, block], rel=0.05)
