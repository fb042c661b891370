"""Blocks of stages and copies, packed into groups of nodes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tutti.bench.plan_placement import packed, ratio_table, run_ratios, tiered
from tutti.document import Place
from tutti.hardware.cluster import Cluster
from tutti.models import load_model
from tutti.plan.check import require_valid
from tutti.plan.job import Job
from tutti.plan.uniform import Degrees, uniform_plan
from tutti.search.answer.explain_groups import groups_text
from tutti.search.strategy.group_packing import Request, Weights, node_paths, pack

NOTHING = Weights({}, {})


def _cluster(nodes: int, leaves: Any, **tier: Any) -> Cluster:
    spine = {"name": "spine", "oversubscription": 4}
    document = {
        "name": "leaves",
        "pools": [{"name": "h", "node": "HGX-H800", "nodes": nodes, "leaves": leaves}],
        "fabric": {"rail_optimized": True, "tiers": [{"name": "leaf", "nodes": 8}, spine | tier]},
    }
    return Cluster.from_document(document, Place("leaves.yaml"))


def _leaves(
    cluster: Cluster, chips: list[list[Any]], requests: list[Request]
) -> dict[Any, set[Any]]:
    paths = node_paths(cluster, cluster.pools[0])
    found: dict[Any, set[Any]] = {}
    for taken, request in zip(chips, requests, strict=True):
        found.setdefault(request.block, set()).update(paths[chip.node] for chip in taken)
    return found


def test_every_block_that_can_stays_under_one_leaf() -> None:
    """Leaves of 6, 8, 3 and 4 nodes hold blocks of 8, 6, 4 and 3; in order three would cross."""
    cluster = _cluster(21, "0*6, 1*8, 2*3, 3*4")
    sizes = {"a": 6, "b": 4, "c": 8, "d": 3}
    requests = [
        Request(name, (0, s), "h", 8)
        for s, (name, nodes) in enumerate(sizes.items()) for _ in range(nodes)
    ]  # fmt: skip
    chips, rest = pack(requests, cluster, NOTHING)
    assert not rest
    assert all(len(leaves) == 1 for leaves in _leaves(cluster, chips, requests).values())
    used = Counter(chip for taken in chips for chip in taken)
    assert len(used) == 168
    assert set(used.values()) == {1}


def test_a_block_that_no_leaf_holds_takes_the_fewest() -> None:
    cluster = _cluster(24, "0*8, 1*8, 2*8")
    requests = [Request("small", (0, 0), "h", 8)] * 4 + [Request("large", (0, 1), "h", 8)] * 16
    chips, rest = pack(requests, cluster, NOTHING)
    leaves = _leaves(cluster, chips, requests)
    assert len(leaves["large"]) == 2
    assert len(leaves["small"]) == 1
    assert len(rest) == 32


def test_tensor_groups_stay_in_nodes() -> None:
    cluster = _cluster(4, [0, 1, 0, 1])
    requests = [Request(b, (0, b), "h", width) for b, width in ((0, 4), (0, 4), (1, 8), (0, 8))]
    chips, _ = pack(requests, cluster, NOTHING)
    assert all(len({chip.node for chip in taken}) == 1 for taken in chips)
    with pytest.raises(ValueError, match="more chips than the pool has"):
        pack([Request(0, (0, 0), "h", 8)] * 5, cluster, NOTHING)


def test_swaps_bring_stages_of_a_copy_together() -> None:
    """Two stages of two copies, where only boundaries weigh: each copy under its own leaf."""
    cluster = _cluster(4, [0, 0, 1, 1])
    requests = [Request(s, (0, s), "h", 8) for s in (0, 0, 1, 1)]
    weights = Weights({}, {(0, 0): 1.0})
    chips, _ = pack(requests, cluster, weights)
    paths = node_paths(cluster, cluster.pools[0])
    place = [paths[taken[0].node] for taken in chips]
    assert place[0] == place[2]
    assert place[1] == place[3]
    kept, _ = pack(requests, cluster, Weights({(0, 0): 1.0, (0, 1): 1.0}, {}))
    assert kept[0][0].node + kept[1][0].node == 1  # gradients alone: the stage stays together


def test_the_placed_plan_is_valid_and_explained() -> None:
    cluster, model = tiered(4.0), load_model("megatron-22b")
    job = Job(sequence_length=2048, global_batch=1024)
    first = uniform_plan(model, cluster, job, Degrees.parse("tp=2,pp=4,sp=1,shard=1"))
    plan = packed(first, cluster, model)
    require_valid(plan, model, cluster)
    before, after = (" ".join(groups_text(one, cluster)) for one in (first, plan))
    assert "of 4 stages 2 below spine keep their gradients there" in after
    assert "of 4 stages 0 below spine" in before
    assert not list(groups_text(first, Cluster.load("S64")))


@pytest.mark.slow
def test_groups_beat_other_orders_where_the_spine_is_narrow() -> None:
    rows = run_ratios(ratios=(1.0, 4.0))
    steps = {(r["oversubscription"], r["placement"]): r for r in rows}
    for column in ("step_time_s", "flows_s"):
        groups, first, mixed = (
            steps[4.0, name][column] for name in ("groups", "first-fit", "random order")
        )
        assert groups < 0.98 * first < first < mixed
        assert steps[1.0, "groups"][column] == pytest.approx(
            steps[1.0, "first-fit"][column], rel=0.005
        )
    assert ratio_table(rows).row_count == len(rows)
