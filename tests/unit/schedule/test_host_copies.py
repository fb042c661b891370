"""What goes to the host and comes from it: not too early, and not too much at a time."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, given, settings

from tests.support.plans import plans
from tutti.plan.plan import Plan
from tutti.schedule.instruction import Op, What
from tutti.schedule.schedule import build_schedule

DRAWN = settings(
    max_examples=100, deadline=None, phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


@DRAWN
@given(plans())
def test_the_host_gets_sums_that_are_whole(plan: Plan) -> None:
    """Copies run in order: what an earlier copy of the same units waited for has ended as well."""
    for one in build_schedule(plan).classes:
        ended: set[int] = set()
        for index, entry in enumerate(one.instructions):
            if entry.op is not Op.OFFLOAD or entry.what is not What.GRADIENTS:
                continue
            open_ends = list(entry.after)
            while open_ends:
                found = open_ends.pop()
                if found not in ended:
                    ended.add(found)
                    open_ends += one.instructions[found].after
            for i, other in enumerate(one.instructions[:index]):
                reduced = other.op is Op.REDUCE_GRADIENTS
                if reduced and other.start < entry.stop and entry.start < other.stop:
                    assert i in ended, f"{entry} does not wait for {other}"


@DRAWN
@given(plans())
def test_optimizer_states_come_two_buckets_at_a_time(plan: Plan) -> None:
    """Whatever is slow, a bucket's states come only when those before the last ones have left."""
    for one in build_schedule(plan).classes:
        moves = [(i, e) for i, e in enumerate(one.instructions) if e.what is What.OPTIMIZER]
        fetches = [(i, e) for i, e in moves if e.op is Op.FETCH]
        stores = [i for i, e in moves if e.op is Op.OFFLOAD]
        assert len(stores) == len(fetches)
        for number, (_, entry) in enumerate(fetches[2:]):
            assert stores[number] in entry.after
