"""What `tutti predict` says of a plan's files, from its cluster file."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tutti.bench.storage.published import published_rows
from tutti.cli.predict import storage_lines
from tutti.cost.storage.prediction import StorageSeconds, storage_seconds
from tutti.document import Place
from tutti.hardware.cluster import Cluster
from tutti.models.load import load_model
from tutti.plan.job import PRECISIONS, Job
from tutti.plan.plan import Plan
from tutti.plan.uniform import Degrees, uniform_plan

MODEL = load_model("llama-3-8b")


def cluster_of(storage: dict[str, Any] | None = None, **pool: Any) -> Cluster:
    words: dict[str, Any] = {
        "name": "priced",
        "pools": [{"name": "a", "chip": "H800", "nodes": 4, **pool}],
    }
    if storage is not None:
        words["storage"] = storage
    return Cluster.from_document(words, Place("test"))


def plan_of(cluster: Cluster) -> Plan:
    job = Job(sequence_length=4096, global_batch=64, precision=PRECISIONS["bf16"])
    return uniform_plan(MODEL, cluster, job, Degrees.parse("tp=8,pp=1,dp=4,shard=1"))


def predicted(cluster: Cluster, step_s: float = 1.0, exposed_s: float = 0.2) -> StorageSeconds:
    plan = plan_of(cluster)
    return storage_seconds(plan, MODEL, cluster, step_s=step_s, exposed_s=exposed_s)


FILES = {"read_bandwidth": "20 GB/s", "write_bandwidth": "10 GB/s"}
FAILING = {"mean_time_between_failures_s": "1000 h", "restart_s": "5 min"}


def test_nothing_is_said_of_storage_that_nobody_described() -> None:
    found = predicted(cluster_of())
    assert found.checkpoint_bytes == 12 * MODEL.num_parameters
    assert (found.checkpoint_write, found.restore, found.saving) == (None, None, None)
    assert storage_lines(found) == []


def test_a_days_losses_follow_from_failures() -> None:
    quiet = predicted(cluster_of({"file_system": FILES}))
    assert quiet.saving is None
    found = predicted(cluster_of({"file_system": FILES}, **FAILING))
    assert found.mean_time_between_failures == pytest.approx(250 * 3600)
    assert found.saving is not None
    assert found.restore is not None
    assert found.start == pytest.approx(300 + found.restore.seconds, rel=1e-3)
    worse = predicted(cluster_of({"file_system": FILES}, **{**FAILING, "restart_s": "50 min"}))
    assert worse.saving is not None
    assert worse.saving.hours_lost_per_day > found.saving.hours_lost_per_day
    lines = storage_lines(found)
    assert "a failure every 250" in lines[2]
    assert "hours of a day are lost" in lines[2]


def test_a_checkpoint_over_the_nics_of_training_stretches_the_step() -> None:
    own = predicted(cluster_of({"file_system": FILES}))
    assert own.stretched_step is None
    shared = predicted(cluster_of({"file_system": {**FILES, "network": "training"}}))
    assert shared.stretched_step is not None
    assert 1.0 < shared.stretched_step < 1.2
    idle = predicted(cluster_of({"file_system": {**FILES, "network": "training"}}), exposed_s=0.0)
    assert idle.stretched_step == 1.0


def test_storage_that_is_too_slow_or_too_small_is_said_with_the_number() -> None:
    slow = {"read_bandwidth": "100 kB/s", "write_bandwidth": "1 GB/s", "capacity": "1 GB"}
    found = predicted(cluster_of({"file_system": slow}))
    data, room = found.warnings
    assert "its data take 10.49 s of 1 s" in data
    assert "1.049 MB/s are needed, 100 kB/s come" in data
    assert "does not fit on the file system" in room
    hopeless = predicted(
        cluster_of({"file_system": FILES}, mean_time_between_failures_s="60 s", restart_s="1 h")
    )
    assert "nothing would ever be done" in hopeless.warnings[-1]


def test_old_and_new_files_price_the_same() -> None:
    """Facts that are left out change nothing."""
    old = predicted(cluster_of({"file_system": FILES}))
    spelled = predicted(cluster_of({"file_system": {**FILES, "latency_s": 0, "network": "own"}}))
    assert replace(old) == spelled


def test_published_storages_in_one_table() -> None:
    rows = list(published_rows())
    size = 12 * load_model("llama-3.1-405b").num_parameters
    for row, rate in zip(rows, (2e12, 2e11, 2.5e10, 1e10, 1.25e9), strict=True):
        assert row.checkpoint_s == pytest.approx(size / rate, rel=0.01)
        assert row.restart_s == pytest.approx(600 + size / rate, rel=0.01)
        assert row.load_each_s == pytest.approx(128 * size / 6 / rate, rel=0.01)
        assert row.load_broadcast_s < row.load_each_s
    assert [row.hours_lost_per_day for row in rows] == sorted(r.hours_lost_per_day for r in rows)
