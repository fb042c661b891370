"""Facts of storage: files of before load, tiers come in order, nonsense is one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tutti.errors import InputError
from tutti.hardware import Cluster
from tutti.hardware.library import shipped_cluster_names
from tutti.hardware.storage import StorageNetwork, StorageTier

OLD = """
name: old
pools: [{name: a, chip: A800, nodes: 2}]
storage:
  file_system: {read_bandwidth: 20 GB/s, write_bandwidth: 10 GB/s, per_node_bandwidth: 5 GB/s}
"""
FULL = """
name: full
pools: [{name: a, chip: A800, nodes: 2, mean_time_between_failures_s: 6000 h, restart_s: 10 min}]
storage:
  host_memory: {read_bandwidth: 80 GB/s, write_bandwidth: 80 GB/s, capacity: 1 TiB}
  local_disk: {read_bandwidth: 6 GB/s, write_bandwidth: 3 GB/s, latency_s: 100 us}
  object_store:
    read_bandwidth: 10 GB/s
    write_bandwidth: 10 GB/s
    latency_s: 30 ms
    operations_per_second: 5000
    network: training
    capacity: 500 TB
"""


def _cluster(folder: Path, text: str) -> Cluster:
    (folder / "cluster.yaml").write_text(text)
    return Cluster.load(folder / "cluster.yaml")


def test_a_file_of_before_loads_and_says_what_it_said(tmp_path: Path) -> None:
    found = _cluster(tmp_path, OLD)
    assert found.to_document()["storage"] == {
        "file_system": {
            "read_bandwidth": 20e9, "write_bandwidth": 10e9, "per_node_bandwidth": 5e9,
        }
    }  # fmt: skip
    assert found.storage.shared is found.storage.file_system
    assert found.pools[0].mean_time_between_failures_s is None


def test_the_fingerprint_of_an_old_file_stays(tmp_path: Path) -> None:
    """Plans embed their cluster by its fingerprint: new facts must not change old ones."""
    assert "latency_s" not in str(_cluster(tmp_path, OLD).to_document()["storage"])


def test_every_fact_comes_back_as_it_was_written(tmp_path: Path) -> None:
    found = _cluster(tmp_path, FULL)
    found.save(tmp_path / "again.yaml")
    assert Cluster.load(tmp_path / "again.yaml") == found
    assert found.pools[0].mean_time_between_failures_s == 6000 * 3600
    target = found.storage.object_store
    assert target is not None
    assert (target.network, target.latency_s) == (StorageNetwork.TRAINING, 0.03)


def test_tiers_come_from_the_nearest(tmp_path: Path) -> None:
    tiers = [tier for tier, _ in _cluster(tmp_path, FULL).storage.tiers()]
    assert tiers == [StorageTier.HOST_MEMORY, StorageTier.LOCAL_DISK, StorageTier.OBJECT_STORE]
    assert [tier.survives_a_node for tier in tiers] == [False, False, True]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"operations_per_second": 0}, "operations_per_second"),
        ({"latency_s": "-1 ms"}, "latency_s"),
        ({"network": "trainign"}, "did you mean 'training'"),
        ({"bandwith": 1}, "bandwith"),
        ({"capacity": "5 apples"}, "unknown unit 'apples'"),
    ],
)
def test_a_wrong_fact_is_one_line(tmp_path: Path, change: dict[str, object], said: str) -> None:
    value = yaml.safe_load(FULL)
    value["storage"]["object_store"].update(change)
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(value))
    with pytest.raises(InputError) as error:
        Cluster.load(tmp_path / "cluster.yaml")
    assert said in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_clusters_that_ship_come_back(tmp_path: Path) -> None:
    for name in shipped_cluster_names():
        cluster = Cluster.load(name)
        cluster.save(tmp_path / f"{name}.yaml")
        assert Cluster.load(tmp_path / f"{name}.yaml") == cluster, name
