"""Mixes of pools: what each is worth to a job, and what the scheduler makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.fleet_machine import small_cluster
from tutti.errors import InputError
from tutti.fleet import events, model_jobs
from tutti.fleet.chips import Grounds
from tutti.fleet.mix_values import Worth, mixes, request_by_worth, shared_out
from tutti.fleet.model_jobs import MixTable, ModelJob
from tutti.fleet.policy import Policy
from tutti.fleet.scheduler import Scheduler
from tutti.hardware.cluster import Cluster

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 320,
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
}  # fmt: skip
CLUSTER = small_cluster(nodes=6, pools=2)  # 6 nodes of p0, 5 of p1


def speeds(job: ModelJob, cluster: Cluster) -> float | None:
    """The second pool is twice as fast; a mixed job loses a tenth; two nodes are too small."""
    if cluster.num_nodes < 4:
        return None
    speed = sum(pool.nodes * (1.0 + (pool.name == "p1")) for pool in cluster.pools)
    return speed * (0.9 if len(cluster.pools) > 1 else 1.0)


def four_nodes(**others: Any) -> ModelJob:
    return ModelJob(
        **{"model": "llama-2-7b", "tokens": 8000.0, "least_nodes": 2, "most_nodes": 4} | others
    )


def test_mixes_are_every_pool_and_every_two() -> None:
    found = list(mixes(CLUSTER, 2, 4))
    assert found == [
        (("p0", 2),), (("p1", 2),), (("p0", 1), ("p1", 1)),
        (("p0", 4),), (("p1", 4),), (("p0", 2), ("p1", 2)),
    ]  # fmt: skip
    with pytest.raises(InputError, match="from 3 to 2 nodes"):
        list(mixes(CLUSTER, 3, 2))


def test_leftovers_join_a_mixed_job_where_that_helps() -> None:
    table = MixTable(CLUSTER, ask=speeds).worths(four_nodes())
    assert [one.mix for one in table] == [
        (("p1", 4),), (("p0", 2), ("p1", 2)), (("p0", 4),),
    ]  # fmt: skip
    machine = Scheduler(Grounds.of(CLUSTER), Policy())
    requests = [request_by_worth(name, 8000.0, table) for name in "abc"]
    assert [shape.pace for shape in requests[0].shapes] == pytest.approx([1.0, 0.675, 0.5])
    for request in requests:
        machine.handle(events.Submit(0.0, request))
    taken = {job: machine.grounds.node_numbers(run.allocation.nodes)
             for job, run in machine.running.items()}  # fmt: skip
    assert taken["a"] == {"p1": [0, 1, 2, 3]}
    # the mixed shape needs two of p1, where one is left: the slow pool now beats the fast one later
    assert taken["b"] == {"p0": [0, 1, 2, 3]}
    assert "c" in machine.queue.jobs
    for name in ("a", "b"):
        assert len(machine.running[name].allocation.nodes) == 4


def test_nothing_fits() -> None:
    with pytest.raises(InputError, match="no plan for llama-2-7b fits any of 3 mixes of"):
        MixTable(CLUSTER, ask=speeds).worths(four_nodes(most_nodes=2))
    with pytest.raises(InputError, match="asks for 9 nodes at least, more than any pool"):
        MixTable(CLUSTER, ask=speeds).worths(four_nodes(least_nodes=9, most_nodes=9))
    for wrong, said in (
        ({"most_nodes": 1}, "from 2 to 1 nodes"), ({"tokens": 0.0}, "'tokens' is 0"),
        ({"global_batch": -8}, "'global_batch' is -8"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            four_nodes(**wrong)


def test_the_planner_is_asked_once_and_a_file_goes_on(tmp_path: Path) -> None:
    file, asked = tmp_path / "mixes.json", list[tuple[str, int | None]]()

    def ask(job: ModelJob, part: Cluster) -> float | None:
        asked.append(("+".join(f"{p.nodes}{p.name}" for p in part.pools), job.global_batch))
        if len(asked) == 4:
            raise KeyboardInterrupt
        return speeds(job, part)

    table = MixTable.load(CLUSTER, file, ask)
    with pytest.raises(KeyboardInterrupt):
        table.fill([four_nodes()])
    assert len(asked) == 4
    again = MixTable.load(CLUSTER, file, ask)
    told: list[tuple[str, int, int]] = []
    again.fill([four_nodes(), four_nodes(tokens=5.0)], lambda *one: told.append(one))
    # three were kept, the fourth is asked again; other tokens are no other question
    assert [mix for mix, _ in asked[4:]] == ["4p0", "4p1", "2p0+2p1"]
    assert [(done, of) for _, done, of in told] == [(0, 3), (1, 3), (2, 3), (3, 3)]
    # the batch is that of the most nodes, for all mixes alike
    assert len({batch for _, batch in asked}) == 1
    assert [one.mix for one in MixTable.load(CLUSTER, file, ask).worths(four_nodes())] == [
        (("p1", 4),), (("p0", 2), ("p1", 2)), (("p0", 4),),
    ]  # fmt: skip
    again.fill([four_nodes(global_batch=8)])
    assert {batch for _, batch in asked[7:]} == {8}
    # a model of the same name is another question once its shapes are others
    folder = tmp_path / "model"
    folder.mkdir()
    for layers in (2, 3):
        (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
        before = len(asked)
        model_jobs.shape_of.cache_clear()  # as a new process
        MixTable.load(CLUSTER, file, ask).fill([four_nodes(model=str(folder))])
        assert len(asked) == before + 6
    with pytest.raises(InputError, match="was made for another cluster than"):
        MixTable.load(small_cluster(nodes=5, pools=2), file)
    file.write_text("[1]")
    with pytest.raises(InputError, match="is no table of what mixes of pools are worth"):
        MixTable.load(CLUSTER, file)


@pytest.mark.slow
def test_the_planner_tables_a_model() -> None:
    cluster = Cluster.load("S32")
    job = ModelJob(
        model="llama-2-7b", tokens=1e9, global_batch=64, sequence_length=2048, most_nodes=2
    )
    best = {one.mix: one.tokens_per_s for one in MixTable(cluster).worths(job)}
    assert best[("a800", 2),] > best[("a800", 1),] > 0
    mixed = best.get((("a800", 1), ("v100", 1)))
    assert mixed is None or mixed > best[("a800", 1),]


def test_sharing_out_is_the_best_of_all_ways_and_uses_mixes_where_they_help() -> None:
    table = [
        Worth(mix, speed, None)
        for mix, speed in (
            ((("p0", 4),), 10.0), ((("p1", 4),), 12.0), ((("p0", 2), ("p1", 2)), 9.0),
        )
    ]  # fmt: skip
    jobs = dict.fromkeys("abc", table)
    even = dict.fromkeys(jobs, 1.0)
    nodes = {"p0": 6, "p1": 6}
    alone = shared_out(nodes, dict.fromkeys(jobs, table[:2]), even)
    assert sorted(alone.values()) == [(("p0", 4),), (("p1", 4),)]  # the third waits
    mixed = shared_out(nodes, jobs, even)
    assert sorted(mixed.values()) == [(("p0", 2), ("p1", 2)), (("p0", 4),), (("p1", 4),)]
    tables = {**jobs, "d": [Worth((("p1", 4),), 12.0, None)]}
    assert shared_out({"p0": 0, "p1": 4}, tables, {**even, "d": 2.0}) == {"d": (("p1", 4),)}
    # where nothing fits anywhere nobody runs
    assert shared_out(nodes, {"a": [], "b": []}, even) == {}
