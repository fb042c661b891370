"""How much memory of a chip and of its host a plan may use, and how fast they talk."""

from __future__ import annotations

from collections.abc import Iterable

from tutti.cost.memory.instruction_memory import Overheads
from tutti.hardware.cluster import Cluster
from tutti.hardware.fabric import CrossKind
from tutti.hardware.pool import Pool
from tutti.search.thresholds import THRESHOLDS


def copy_bandwidth(pool: Pool, lanes: int = 1) -> float:
    """Return the bytes per second between a chip and its host, all chips at once.

    With two `lanes` the host's memory also carries what it forwards between pools.
    """
    host, node = pool.node.host, pool.node
    fair = host.memory_bandwidth * node.hosts / node.num_chips
    return min(host.device_bandwidth, fair / lanes)


def host_bytes(pool: Pool) -> float:
    """Return a chip's part of its host's memory that may hold what chips offload."""
    node = pool.node
    return THRESHOLDS.host_share * node.host.memory_bytes * node.hosts / node.num_chips


def usable_bytes(memory_bytes: float, overheads: Overheads) -> float:
    """Return what of a chip's memory tensors may take."""
    fixed = overheads.context_bytes + overheads.workspace_bytes
    return (memory_bytes - fixed) / (1.0 + overheads.slack)


def forwards(cluster: Cluster, pool: str, others: Iterable[str]) -> bool:
    """Tell whether what a pool exchanges with one of the others passes through host memory."""
    return any(
        cluster.cross_link(pool, other).kind is CrossKind.HOST_FORWARDED
        for other in others
        if other != pool
    )
