"""From chains to cuts: who shares states with whom, and what expert groups cost inside a node."""

from __future__ import annotations

import pytest

from tutti.hardware.cluster import Cluster
from tutti.hardware.fabric import CrossKind
from tutti.plan.job import ScheduleKind
from tutti.search.ask_from_values import make_problem
from tutti.search.cutting.build_draft import PipelineCopies, cuts_of
from tutti.search.pricing.memory_budget import copy_bandwidth, forwards
from tutti.search.pricing.simulate_draft import DraftSimulator
from tutti.search.pricing.unit_tables import NONE, Config, Tables
from tutti.search.strategy.coarse_chain import Chain, ScheduleOption


@pytest.fixture(scope="module")
def tables() -> Tables:
    return Tables(make_problem("deepseek-v3", "B1024", sequence_length=4096, global_batch=4096))


def part(
    config: Config, stages: int, copies: int, micro_batches: int, shard: int = 1
) -> PipelineCopies:
    chain = Chain(
        configs=(config,), stages=(stages,), copies=copies, sequences=config.sequences,
        schedule=ScheduleOption(kind=ScheduleKind.ONE_F_ONE_B), shard=shard,
        pace=1.0, fill=0.0, closing=0.0,
    )  # fmt: skip
    return PipelineCopies(chain=chain, copies=copies, micro_batches=micro_batches)


def relieved(tables: Tables, parts: list[PipelineCopies]) -> int:
    """Blocks of the first part for which memory does not suffice."""
    cuts = cuts_of(tables, parts)
    assert cuts is not None
    pairs = zip(cuts[0].recompute, cuts[0].offload, strict=True)
    return sum(
        b - a
        for recompute, offload in pairs
        for a, b in (*recompute.full, *offload.activations, *offload.optimizer)
    )


def test_pipelines_that_hold_the_same_units_share_their_states(tables):
    own = part(Config("ascend", 2, 2, 8, 1), 32, 2, 300)
    other = part(Config("a800", 2, 2, 8, 1), 32, 4, 600)
    assert relieved(tables, [own, other]) < relieved(tables, [own])


def test_what_the_shared_states_leave_room_for_fits(tables):
    sizes = (("a800", 4, 601), ("p800", 2, 585), ("ascend", 2, 261))
    parts = [part(Config(pool, 2, 2, 8, 1), 32, copies, n) for pool, copies, n in sizes]
    found = DraftSimulator(tables).parts(parts)
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


def test_copies_share_host_memory_with_what_it_forwards():
    mixed = Cluster.load("small-mixed")
    pool = mixed.pools[0]
    fair = pool.node.host.memory_bandwidth * pool.node.hosts / pool.node.num_chips
    assert copy_bandwidth(pool, 2) == pytest.approx(min(pool.node.host.device_bandwidth, fair / 2))
    names = [p.name for p in mixed.pools]
    kinds = {mixed.cross_link(names[0], other).kind for other in names[1:]}
    assert forwards(mixed, names[0], names) is (CrossKind.HOST_FORWARDED in kinds)
    assert not forwards(mixed, names[0], names[:1])
