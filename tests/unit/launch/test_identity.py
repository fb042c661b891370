from __future__ import annotations

import pytest
from hypothesis import given, settings

from tests.support.launching import crossed_plan, plan_of
from tests.support.plans import plans
from tutti.document import Place
from tutti.errors import InputError
from tutti.hardware.cluster import Cluster
from tutti.launch.hosts import find_components
from tutti.launch.identity import device_index, is_restarted, rank_of_process, used_chips
from tutti.plan.check import embedded_cluster
from tutti.plan.chips import ChipSet
from tutti.plan.plan import Plan, RankMap, Replica


def test_a_process_is_the_chip_that_it_was_started_for() -> None:
    plan = crossed_plan()
    # h100/0 holds slots 0, 1 of stage 0 and 4, 5 of stage 1: four processes, two far apart
    ranks = [
        rank_of_process(plan, {"TUTTI_NODE": "h100/0", "LOCAL_RANK": str(local), "RANK": "3"})
        for local in range(4)
    ]
    assert ranks == [8, 9, 24, 25]
    assert rank_of_process(plan, {"TUTTI_NODE": "a100/1", "LOCAL_RANK": "0"}) == 0


def test_part_of_a_node_is_named_by_its_slots() -> None:
    plan = crossed_plan()
    environ = {"TUTTI_NODE": "h100/0/4-7", "LOCAL_RANK": "1"}
    assert rank_of_process(plan, environ) == 25


def test_without_a_node_the_rank_is_taken_as_it_is() -> None:
    plan = crossed_plan()
    assert rank_of_process(plan, {"RANK": "7", "WORLD_SIZE": "26"}) == 7
    cluster = Cluster.from_document(
        {"name": "one", "pools": [{"name": "a", "chip": "H100", "chips_per_node": 1}]},
        Place("one"),
    )
    alone = plan_of(cluster, [[Replica(chips=ChipSet.of("a/0/0"))]])
    assert rank_of_process(alone, {}) == 0


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (
            {"TUTTI_NODE": "h100/1", "LOCAL_RANK": "0"},
            "TUTTI_NODE is 'h100/1', where the plan uses",
        ),
        ({"TUTTI_NODE": "h10/0", "LOCAL_RANK": "0"}, "did you mean 'h100/0'?"),
        ({"TUTTI_NODE": "unused/0", "LOCAL_RANK": "0"}, "where the plan uses no chip"),
        ({"TUTTI_NODE": "h100", "LOCAL_RANK": "0"}, "write it as 'pool/node'"),
        ({"TUTTI_NODE": "h100/0/", "LOCAL_RANK": "0"}, "write it as 'pool/node'"),
        ({"TUTTI_NODE": "h100/0/x", "LOCAL_RANK": "0"}, "write slots like"),
        (
            {"TUTTI_NODE": "h100/0", "LOCAL_RANK": "4"},
            "LOCAL_RANK is 4, but the plan uses 4 chips of h100/0 (slots 0-1,4-5); start 4",
        ),
        ({"TUTTI_NODE": "h100/0"}, "LOCAL_RANK is not set"),
        ({"TUTTI_NODE": "h100/0", "LOCAL_RANK": "-1"}, "LOCAL_RANK is '-1'; expected a whole"),
        ({}, "RANK is not set; start the ranks by"),
        ({"RANK": "26"}, "RANK is 26, but the plan has 26 ranks, counted from 0"),
        ({"RANK": "0", "WORLD_SIZE": "8"}, "WORLD_SIZE is 8, but the plan has 26 ranks"),
    ],
)
def test_errors_name_the_variable_and_the_remedy(environ: dict[str, str], said: str) -> None:
    with pytest.raises(InputError) as error:
        rank_of_process(crossed_plan(), environ)
    assert said in str(error.value)


@settings(max_examples=40)
@given(plan=plans())
def test_every_rank_is_started_once(plan: Plan) -> None:
    found: list[int] = []
    node_ranks: list[int] = []
    for component in find_components(plan, embedded_cluster(plan)):
        node_ranks += range(component.first, component.first + len(component.hosts))
        for host in component.hosts:
            here = [
                rank_of_process(plan, {"TUTTI_NODE": host.name, "LOCAL_RANK": str(local)})
                for local in range(component.num_chips)
            ]
            assert tuple(here) == host.ranks
            found += here
    assert sorted(found) == list(range(plan.num_ranks))
    assert node_ranks == list(range(len(node_ranks)))
    places = RankMap(plan)
    assert all(places.place(rank).chip == chip for chip, rank in used_chips(plan).items())


def test_a_launched_process_sees_its_chips_only() -> None:
    launched = {"TUTTI_NODE": "h100/0", "LOCAL_RANK": "2"}
    assert device_index(launched, slot=4) == 2
    assert device_index({"LOCAL_RANK": "2"}, slot=4) == 4


def test_restarts_are_counted() -> None:
    assert not is_restarted({})
    assert not is_restarted({"TUTTI_ATTEMPT": "0"})
    assert is_restarted({"TUTTI_ATTEMPT": "2"})
    assert not is_restarted({"TUTTI_ATTEMPT": "", "TORCHELASTIC_RESTART_COUNT": "0"})
    assert is_restarted({"TUTTI_ATTEMPT": "0", "TORCHELASTIC_RESTART_COUNT": "1"})
    assert is_restarted({"TUTTI_ATTEMPT": "0", "SLURM_RESTART_COUNT": "1"})
    with pytest.raises(InputError, match="TUTTI_ATTEMPT is 'x'"):
        is_restarted({"TUTTI_ATTEMPT": "x"})
