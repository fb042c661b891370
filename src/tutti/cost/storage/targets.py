"""How fast nodes read and write storage together, as described, or as measured.

A transfer takes the latency of its first operation and then as long as the slowest of what it
needs: the bytes over the storage's rate in all, over the rate that its nodes reach, and its
operations over those that the storage answers in a second. Over the NICs of training, a node's
file traffic is a flow beside the collectives', and both get their fair share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tutti.fabric.shares import fair_rates
from tutti.hardware.profile import Profile, StorageAction
from tutti.hardware.storage import (
    AnyTarget,
    NodeStorage,
    Storage,
    StorageNetwork,
    StorageTarget,
    StorageTier,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clients:
    """The nodes that use a storage at the same time."""

    nodes: int
    nic_rate: float | None = None  # of one node's training NICs; None: none are known

    def limited(self, target: AnyTarget, rate: float, *, beside_training: bool = False) -> float:
        """Return the bytes per second of all nodes, where the storage gives `rate` in all."""
        if isinstance(target, NodeStorage):
            return rate * self.nodes
        share = rate / self.nodes
        if target.per_node_bandwidth is not None:
            share = min(share, target.per_node_bandwidth)
        if target.network is StorageNetwork.TRAINING and self.nic_rate is not None:
            share = self.flow(share, self.nic_rate, beside_training=beside_training)[0]
        return share * self.nodes

    @staticmethod
    def flow(share: float, nic_rate: float, *, beside_training: bool) -> tuple[float, float]:
        """Return what files and collectives get of a node's NICs: max-min, as links are shared.

        Files ask for no more than their share of the storage; collectives take all they can get.
        """
        files = [0, 1]  # over the NICs, and over the node's share of the storage
        paths = np.array([files, [0, -1]] if beside_training else [files], dtype=np.int32)
        rates = fair_rates(paths, np.array([nic_rate, share]))
        return float(rates[0]), float(rates[1]) if beside_training else nic_rate


def read_seconds(
    target: AnyTarget, num_bytes: float, clients: Clients, operations: float = 1.0
) -> float:
    """Return how long nodes read so many bytes in all, in so many operations."""
    rate = clients.limited(target, target.read_bandwidth)
    return _seconds(target, num_bytes / rate, clients, operations)


def write_seconds(
    target: AnyTarget,
    num_bytes: float,
    clients: Clients,
    operations: float = 1.0,
    *,
    beside_training: bool = False,
) -> float:
    """Return how long nodes write so many bytes in all, in so many operations."""
    rate = clients.limited(target, target.write_bandwidth, beside_training=beside_training)
    return _seconds(target, num_bytes / rate, clients, operations)


def _seconds(target: AnyTarget, moving: float, clients: Clients, operations: float) -> float:
    asking = 0.0
    if target.operations_per_second is not None:
        all_nodes = clients.nodes if isinstance(target, NodeStorage) else 1
        asking = operations / (target.operations_per_second * all_nodes)
    return target.latency_s + max(moving, asking)


# --- measured --------------------------------------------------------------------------------


def measured_storage(storage: Storage, profiles: Sequence[Profile], chips_per_node: int) -> Storage:
    """Return the storage with what `tutti profile --storage` found on one node.

    A shared target keeps its rates in all, and a node gets no more than one node was seen to get.
    One that the cluster file does not name is taken to be no faster than that one node found it.
    """
    for profile in profiles:
        for tier in dict.fromkeys(figure.tier for figure in profile.storage):
            storage = _with_measured(storage, profile, tier, chips_per_node)
    return storage


def _with_measured(
    storage: Storage, profile: Profile, tier: StorageTier, chips_per_node: int
) -> Storage:
    write = profile.storage_figure(tier, StorageAction.WRITE, chips_per_node)
    read = profile.storage_figure(tier, StorageAction.READ, chips_per_node)
    if write is None or read is None:
        return storage
    flush = profile.storage_figure(tier, StorageAction.FLUSH, 1)
    latency_s = flush.seconds if flush is not None else 0.0
    if tier is StorageTier.LOCAL_DISK:
        disk = NodeStorage(
            read_bandwidth=read.bandwidth, write_bandwidth=write.bandwidth, latency_s=latency_s
        )
        return replace(storage, local_disk=disk)
    known: StorageTarget | None = getattr(storage, tier.value)
    if known is None:
        measured = StorageTarget(
            read_bandwidth=read.bandwidth, write_bandwidth=write.bandwidth, latency_s=latency_s
        )
    else:
        slower = min(read.bandwidth, write.bandwidth)
        measured = replace(known, per_node_bandwidth=slower)
    if tier is StorageTier.FILE_SYSTEM:
        return replace(storage, file_system=measured)
    return replace(storage, object_store=measured)


def checksum_rate(profiles: Sequence[Profile]) -> float | None:
    """Return how fast one process takes checksums, where it was measured."""
    for profile in profiles:
        for figure in profile.storage:
            if figure.action is StorageAction.CHECKSUM:
                return figure.bandwidth
    return None
