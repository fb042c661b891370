"""Where the next generation's state comes from: the newest step that is whole somewhere."""

from __future__ import annotations

import pytest

from tests.support.launching import plan_of
from tutti.elastic.messages import Report
from tutti.elastic.sources import Past, find_source, missing_state
from tutti.hardware.cluster import Cluster
from tutti.models.load import load_model
from tutti.models.spec import ModelSpec
from tutti.plan.chips import ChipSet
from tutti.plan.plan import Plan, Replica, Synchronisation

CHIPS = ("fast/0/0", "fast/0/1")


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return load_model("gpt2")


def two_stages(spec: ModelSpec) -> Plan:
    chips = [[Replica(chips=ChipSet.of(chip))] for chip in CHIPS]
    return plan_of(Cluster.load("laptop"), chips, spec, tied_owner=0)


def two_copies(spec: ModelSpec, level: int) -> Plan:
    rules = (Synchronisation(units=(0, spec.num_units), shard_level=level),)
    chips = [[Replica(chips=ChipSet.of("fast/0/0-1"), count=2)]]
    return plan_of(Cluster.load("laptop"), chips, spec, synchronisation=rules)


def left(rank: int, step: int = 7, **changes: object) -> Report:
    values = {"chip": CHIPS[rank], "process": 1, "step": step, "held": 1, "held_rank": rank}
    return Report(**{**values, **changes})  # type: ignore[arg-type]


def test_replicas_hold_everything_and_shards_do_not(spec: ModelSpec) -> None:
    assert missing_state(two_copies(spec, 0), spec, {1}) == ""
    assert missing_state(two_copies(spec, 1), spec, {1}) != ""
    assert missing_state(two_stages(spec), spec, {0}) != ""
    assert missing_state(two_stages(spec), spec, {0, 1}) == ""


def test_a_replica_is_enough(spec: ModelSpec) -> None:
    past = {1: Past(plan=two_copies(spec, 0), chips=CHIPS)}
    source = find_source([left(1)], {CHIPS[1]: left(1)}, past, spec, checkpoint=4)
    assert (source.kind, source.step, source.holders) == ("memory", 7, (CHIPS[1],))


def test_a_lost_stage_comes_from_its_copy_of_the_same_step(spec: ModelSpec) -> None:
    past = {1: Past(plan=two_stages(spec), chips=CHIPS)}
    fresh = Report(chip=CHIPS[1], process=2, copy_steps=((1, 6), (1, 7)))
    there = {CHIPS[0]: left(0), CHIPS[1]: fresh}
    source = find_source([left(0)], there, past, spec, checkpoint=4)
    assert (source.kind, source.step) == ("memory", 7)
    assert "1 copy in memory" in source.text


def test_copies_of_an_older_step_take_all_back(spec: ModelSpec) -> None:
    past = {1: Past(plan=two_stages(spec), chips=CHIPS)}
    there = {
        CHIPS[0]: left(0, copy_steps=((1, 4), (1, 6))),
        CHIPS[1]: Report(chip=CHIPS[1], process=2, copy_steps=((1, 4), (1, 6))),
    }
    source = find_source([there[CHIPS[0]]], there, past, spec, checkpoint=4)
    assert (source.kind, source.step, source.holders) == ("memory", 6, ())


def test_copies_of_another_plan_do_not_count(spec: ModelSpec) -> None:
    past = {1: Past(plan=two_stages(spec), chips=CHIPS), 2: Past(plan=two_stages(spec),
            chips=CHIPS[::-1])}  # fmt: skip
    fresh = Report(chip=CHIPS[1], process=2, copy_steps=((1, 7),))
    there = {CHIPS[0]: left(0, held=2, held_rank=1), CHIPS[1]: fresh}
    assert find_source([there[CHIPS[0]]], there, past, spec, checkpoint=4).kind == "disk"


def test_the_checkpoint_and_then_the_beginning(spec: ModelSpec) -> None:
    past = {1: Past(plan=two_stages(spec), chips=CHIPS)}
    there = {CHIPS[0]: left(0)}
    assert find_source([left(0)], there, past, spec, checkpoint=4).step == 4
    source = find_source([left(0)], there, past, spec, checkpoint=None)
    assert source.kind == "begin"
    words = "from the beginning: nobody holds all of 3.attention_norm.weight at step 7, and there"
    assert source.text.startswith(words)
    gone = find_source([], {}, past, spec, checkpoint=None)
    assert gone.text.startswith("from the beginning: no state of it is left")


def test_those_who_lack_only_the_sums_finish_with_the_others(spec: ModelSpec) -> None:
    past = {1: Past(plan=two_stages(spec), chips=CHIPS)}
    ahead = left(0, step=8, sums=(1.0, 2.0))
    behind = left(1, step=7, pending=8)
    there = {CHIPS[0]: ahead, CHIPS[1]: behind}
    source = find_source([ahead, behind], there, past, spec, checkpoint=None)
    assert (source.step, source.sums, set(source.holders)) == (8, (1.0, 2.0), set(CHIPS))
    not_asked = left(1, step=7)  # it never gave its part: then nobody can have applied the step
    source = find_source([left(0), not_asked], there, past, spec, checkpoint=None)
    assert (source.step, source.sums) == (7, ())


def test_a_partner_has_what_a_host_took_with_it(spec: ModelSpec) -> None:
    """The lost chip is heard of no more; its copy of the step before lies with another host."""
    past = {1: Past(plan=two_stages(spec), chips=CHIPS)}
    here = left(0, step=7, copy_steps=((1, 6), (1, 7)))
    kept = {CHIPS[1]: [("far/0", 1, 6)]}
    found = find_source([here], {CHIPS[0]: here}, past, spec, None, kept)
    assert (found.kind, found.step, found.copies) == ("memory", 6, (CHIPS[0],))
    assert found.elsewhere == ((CHIPS[1], "far/0"),)
    # of the step that the other is at: nothing is made again
    kept = {CHIPS[1]: [("far/0", 1, 7)]}
    found = find_source([here], {CHIPS[0]: here}, past, spec, None, kept)
    assert (found.step, found.holders, found.copies) == (7, (CHIPS[0],), ())
    assert found.elsewhere == ((CHIPS[1], "far/0"),)
    assert "1 copy of a partner" in found.text
    # of another generation: it lies by another plan
    kept = {CHIPS[1]: [("far/0", 2, 7)]}
    assert find_source([here], {CHIPS[0]: here}, past, spec, 3, kept).kind == "disk"
