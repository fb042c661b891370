"""Checkpoints through the tiers, restores both ways, flows on shared NICs: worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tutti.cost.storage.checkpoints import (
    CheckpointFacts,
    checkpoint_bytes,
    restore_seconds,
    safe_seconds,
    stall_seconds,
    tier_times,
)
from tutti.cost.storage.targets import (
    Clients,
    checksum_rate,
    measured_storage,
    read_seconds,
    write_seconds,
)
from tutti.hardware.profile import Profile, StorageAction, StorageFigure
from tutti.hardware.storage import (
    NodeStorage,
    Storage,
    StorageNetwork,
    StorageTarget,
    StorageTier,
)
from tutti.models.load import load_model
from tutti.plan.job import PRECISIONS, Job

GB = 1e9
FILES = StorageTarget(read_bandwidth=200 * GB, write_bandwidth=100 * GB, per_node_bandwidth=5 * GB)
FACTS = CheckpointFacts(
    num_bytes=1000 * GB,
    kept_bytes=4000 * GB,
    ranks=64,
    clients=Clients(nodes=8, nic_rate=50 * GB),
    copy_rate=25 * GB,
    network_rate=50 * GB / 8,
)


def test_nodes_reach_what_they_can_and_no_more_than_the_storage_has() -> None:
    assert read_seconds(FILES, 400 * GB, Clients(nodes=8)) == pytest.approx(10.0)  # 8 × 5 GB/s
    assert read_seconds(FILES, 400 * GB, Clients(nodes=100)) == pytest.approx(2.0)
    slow = replace(FILES, latency_s=0.5, operations_per_second=100.0)
    assert read_seconds(slow, 400 * GB, Clients(nodes=100), 64) == pytest.approx(2.5)
    assert read_seconds(slow, 400 * GB, Clients(nodes=100), 10_000) == pytest.approx(100.5)


def test_files_and_collectives_share_nics_fairly() -> None:
    over = replace(FILES, network=StorageNetwork.TRAINING, per_node_bandwidth=None)
    narrow = Clients(nodes=2, nic_rate=10 * GB)
    alone = write_seconds(over, 100 * GB, narrow)
    assert alone == pytest.approx(5.0)  # the NICs, not 100 GB/s
    beside = write_seconds(over, 100 * GB, narrow, beside_training=True)
    assert beside == pytest.approx(10.0)  # half of them
    assert narrow.flow(2 * GB, 10 * GB, beside_training=True) == pytest.approx((2 * GB, 8 * GB))
    own = replace(over, network=StorageNetwork.OWN)
    assert write_seconds(own, 100 * GB, narrow, beside_training=True) == pytest.approx(1.0)


def test_a_checkpoint_goes_from_tier_to_tier() -> None:
    storage = Storage(
        host_memory=NodeStorage(
            read_bandwidth=100 * GB, write_bandwidth=50 * GB, capacity=100 * GB
        ),
        local_disk=NodeStorage(read_bandwidth=2 * GB, write_bandwidth=5 * GB),
        file_system=FILES,
    )
    times = list(tier_times(storage, FACTS))
    stall = 1000 / 64 / 25
    assert stall_seconds(FACTS) == pytest.approx(stall)
    memory, disk, files = times
    assert memory.seconds == pytest.approx(1000 / (8 * 50))
    assert not memory.fits  # 8 × 100 GB
    assert disk.seconds == pytest.approx(1000 / (8 * 5))
    assert files.seconds == pytest.approx(1000 / (8 * 2))  # the disk is read slower than 40 GB/s
    assert files.done_s == pytest.approx(stall + memory.seconds + disk.seconds + files.seconds)
    assert safe_seconds(times) == files.done_s
    assert safe_seconds(times[:2]) is None


def test_one_reads_for_all_where_replicas_need_the_same_bytes() -> None:
    both = restore_seconds(FILES, FACTS)
    assert both.each_s == pytest.approx(4000 / 40)
    assert both.broadcast_s == pytest.approx(1000 / 40 + 3000 / 64 / (50 / 8))
    assert both.broadcast_is_cheaper
    sharded = restore_seconds(FILES, replace(FACTS, kept_bytes=1000 * GB))
    assert not sharded.broadcast_is_cheaper
    slow_network = restore_seconds(FILES, replace(FACTS, network_rate=0.1 * GB))
    assert not slow_network.broadcast_is_cheaper


def test_a_checkpoint_holds_the_weight_once_and_both_moments() -> None:
    """Not the rounded copy beside the master: that follows from it (12 bytes, as files have)."""
    model = load_model("llama-3-8b")
    bf16 = Job(sequence_length=8192, global_batch=8, precision=PRECISIONS["bf16"])
    assert checkpoint_bytes(bf16, model) == 12 * model.num_parameters
    assert checkpoint_bytes(replace(bf16, optimizer="sgd"), model) == 4 * model.num_parameters


def test_what_was_measured_on_a_node_counts_for_every_node() -> None:
    figures = tuple(
        StorageFigure(
            tier=tier, action=action, processes=processes, bytes=4096, seconds=1e-4,
            bandwidth=bandwidth * processes,
        )
        for tier in (StorageTier.LOCAL_DISK, StorageTier.FILE_SYSTEM)
        for action, bandwidth in (
            (StorageAction.WRITE, GB), (StorageAction.READ, 2 * GB),
            (StorageAction.FLUSH, 1e6), (StorageAction.CHECKSUM, 3 * GB),
        )
        for processes in (1, 2)
    )  # fmt: skip
    profile = Profile(chip="CPU", origin="test", launch_floor_s=0.0, storage=figures)
    found = measured_storage(Storage(file_system=FILES), (profile,), 8)
    assert found.local_disk is not None
    assert (found.local_disk.write_bandwidth, found.local_disk.read_bandwidth) == (2 * GB, 4 * GB)
    assert found.file_system == replace(FILES, per_node_bandwidth=2 * GB)
    assert measured_storage(Storage(), (profile,), 1).file_system == StorageTarget(
        read_bandwidth=2 * GB, write_bandwidth=GB, latency_s=1e-4
    )
    assert checksum_rate((profile,)) == 3 * GB
    with_sums = replace(FACTS, checksum_rate=3 * GB)
    extra = restore_seconds(FILES, with_sums).each_s - restore_seconds(FILES, FACTS).each_s
    assert extra == pytest.approx(4000 / 64 / 3)
