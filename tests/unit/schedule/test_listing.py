"""Lists as columns: what is played again is what would have been written."""

from __future__ import annotations

from unittest import mock

import numpy as np
from hypothesis import given, settings

from tests.support.plans import plans
from tutti.schedule import lists
from tutti.schedule.instruction import Op
from tutti.schedule.listing import Listing, listing_of
from tutti.schedule.schedule import build_schedule
from tutti.schedule.tape import Tape

FEW = settings(max_examples=max(50, settings.default.max_examples))


def written_out(plan):
    """Build a schedule whose every pass is written instruction by instruction."""
    plain = lists.write_list
    with mock.patch("tutti.schedule.schedule.write_list", lambda given: plain(given, replay=False)):
        return build_schedule(plan)


@FEW
@given(plans())
def test_passes_that_are_played_again_are_those_that_would_be_written(plan):
    played, written = build_schedule(plan), written_out(plan)
    assert [c.instructions for c in played.classes] == [c.instructions for c in written.classes]


def test_most_passes_of_a_long_list_are_played_again():
    plays, records = [], []
    play, record = Tape.play, Tape.record
    with (
        mock.patch.object(Tape, "play", lambda *a: plays.append(1) or play(*a)),
        mock.patch.object(Tape, "record", lambda *a: records.append(1) or record(*a)),
    ):
        build_schedule(_long_plan())
    assert len(plays) > 20 * len(records)


def _long_plan():
    from tutti.hardware.cluster import Cluster
    from tutti.models.load import load_model
    from tutti.plan.job import Job
    from tutti.plan.uniform import Degrees, uniform_plan

    job = Job(sequence_length=1024, global_batch=512)
    degrees = Degrees(pp=4, micro_batch=1, shard=2, recompute="full")
    return uniform_plan(load_model("llama-3.2-1b"), Cluster.load("small-mixed"), job, degrees)


@FEW
@given(plans())
def test_columns_and_instructions_say_the_same(plan):
    for rank_class in build_schedule(plan).classes:
        listing = rank_class.instructions
        again = Listing.of(listing.whole)
        assert [listing[i] for i in range(len(listing))] == list(again)
        for name in ("op", "micro_batch", "first", "stop", "what", "inside", "after"):
            assert np.array_equal(getattr(listing, name), getattr(again, name))
        kinds = {(e.op, e.start, e.stop, e.what, e.scope, e.micro_batch < 0): None for e in listing}
        assert len(listing.examples) == len(kinds)
        for entry, code in zip(listing, listing.kinds[1].tolist(), strict=True):
            assert listing.examples[code]._replace(micro_batch=0, after=()) == entry._replace(
                micro_batch=0, after=()
            )


def test_a_plain_tuple_is_a_list_too():
    listing = build_schedule(_long_plan()).classes[0].instructions
    entries = tuple(listing)
    assert listing_of(entries) == listing
    assert listing_of(listing) is listing
    assert [entries[i].op for i in listing.where(Op.SEND).tolist()] == [
        e.op for e in entries if e.op is Op.SEND
    ]
