"""What an instruction should take by itself; a Receive takes what its Send is priced at."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.support.launching import plan_of
from tests.support.plans import small_model
from tutti.cost.plan.sources import Sources
from tutti.hardware.cluster import Cluster
from tutti.plan.chips import ChipSet
from tutti.plan.plan import Replica
from tutti.ranks.rank_places import Seats, class_of
from tutti.schedule.instruction import Op, What
from tutti.simulate.estimate import estimate
from tutti.train.run.measure import expected_seconds


def test_a_receive_takes_the_transfer() -> None:
    cluster, model = Cluster.load("laptop"), small_model(4)
    chips = [[Replica(chips=ChipSet.of("fast/0/0"))], [Replica(chips=ChipSet.of("slow/0/1"))]]
    plan = plan_of(cluster, chips, model)
    found = estimate(plan, model, cluster, Sources())
    seats = Seats(plan, model)
    expected = {}
    for rank in (0, 1):
        own = class_of(found.schedule, seats[rank])
        engine: Any = SimpleNamespace(
            schedule=found.schedule,
            seat=seats[rank],
            instructions=found.schedule.classes[own].instructions,
        )
        seconds = expected_seconds(engine, found)
        prices = found.priced.costs.classes[own].seconds.tolist()
        assert len(seconds) == len(prices)
        for entry, second, price in zip(engine.instructions, seconds, prices, strict=True):
            if entry.op is Op.RECEIVE:
                assert second > price
            else:
                assert second == price
            expected[rank, entry.op, entry.what, entry.micro_batch] = second
    for what, sender in ((What.ACTIVATIONS, 0), (What.GRADIENTS, 1)):
        for micro_batch in (0, 1):
            sent = expected[sender, Op.SEND, what, micro_batch]
            received = expected[1 - sender, Op.RECEIVE, what, micro_batch]
            assert received >= sent > 0
