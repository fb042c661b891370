"""Prices of stage boundaries that are remembered: equal to those worked out anew."""

from __future__ import annotations

import itertools

import pytest

from tutti.bench.judge.questions import draw
from tutti.cost.network import stage_boundaries
from tutti.cost.network.program_choice import Efficiency
from tutti.cost.network.reach import limits_of
from tutti.cost.network.stage_boundaries import SharedTiers, boundary_price, telling_transfers
from tutti.plan.chips import ChipSet
from tutti.plan.plan import Replica, Stage
from tutti.schedule.boundary import Boundary

LENGTH = 1024


def oversubscribed():
    """Return the first drawn cluster whose tiers limit, with two nodes of eight in a pool."""
    for number in itertools.count():
        cluster = draw(number).cluster
        roomy = [p for p in cluster.pools if p.nodes >= 4 and p.node.num_chips == 8]
        if roomy and limits_of(cluster) is not None:
            return cluster, roomy[0].name
    raise AssertionError


def stage(chips, tp, count, sequences):
    replica = Replica(chips=ChipSet.of(chips), tp=tp, cp=1, count=count, sequences=sequences)
    return Stage(units=((0, 1),), replicas=(replica,))


def wires(pool):
    """Return boundaries of few shapes between different nodes."""
    for tp, count in ((1, 8), (2, 4), (8, 1)):
        for one, two in itertools.permutations(range(3), 2):
            yield Boundary(
                stage(f"{pool}/{one}/0-7", tp, count, 8 // count),
                stage(f"{pool}/{two}/0-7", 8 // tp, tp, 8 // tp),
                LENGTH,
            )


@pytest.mark.parametrize("tiers", [False, True])
def test_a_remembered_price_is_that_worked_out_anew(tiers):
    cluster, pool = oversubscribed()
    asked = list(wires(pool))
    shared = SharedTiers(limits_of(cluster), asked[:5]) if tiers else None

    def priced(wire):
        return boundary_price(wire, cluster, 8192.0, Efficiency(), shared=shared)

    first = [priced(wire) for wire in asked]
    assert [priced(wire) for wire in asked] == first
    for wire, known in zip(asked, first, strict=True):
        stage_boundaries._remembered.cache_clear()
        stage_boundaries._told.cache_clear()
        assert priced(wire) == known
        sides = [wire.from_rank(rank) for rank in range(8)] + [wire.to_rank(r) for r in range(8)]
        assert all(told in sides for told in telling_transfers(wire))


def test_prices_know_how_many_others_share_the_tiers():
    cluster, pool = oversubscribed()
    wire, *others = wires(pool)
    limits = limits_of(cluster)
    alone, crowded = (SharedTiers(limits, some) for some in ([wire], [wire, *others]))
    assert alone == SharedTiers(limits, [wire])
    assert hash(alone) == hash(SharedTiers(limits, [wire]))
    assert alone != crowded

    def seconds(shared):
        return boundary_price(wire, cluster, 8192.0, Efficiency(), shared=shared).seconds

    assert seconds(alone) <= seconds(crowded)
    assert seconds(alone) == seconds(SharedTiers(limits, [wire]))
