"""A cluster of so many ranks out of this machine, described as it is.

A machine with accelerators gives as many of them as are asked for. One without shares its cores,
memory and bandwidth out among so many processes: each is a chip, and they meet in shared memory.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tutti.errors import InputError
from tutti.hardware.chip import Chip, Dtype
from tutti.hardware.cluster import Cluster
from tutti.hardware.discover import cpu_chip, discover, find_host
from tutti.hardware.node import Island
from tutti.hardware.pool import Pool
from tutti.hardware.slots import Slots
from tutti.units import many

CPU_POOL = "cpu"  # as `discover` calls it
# As the catalog and /proc/cpuinfo call them.
_CPU_VENDORS = ("generic", "genuineintel", "authenticamd", "hygongenuine", "shanghai")
# Between two processes of one host: what the catalog's CPU-host says, not measured.
_SHARED_BANDWIDTH, _SHARED_LATENCY_S = 30e9, 1e-6


def local_cluster(ranks: int | None = None, here: Cluster | None = None) -> Cluster:
    """Return this machine; with `ranks`, as that many chips."""
    cluster = here or discover().cluster
    if ranks is None:
        return cluster
    if [pool.name for pool in cluster.pools] == [CPU_POOL]:
        return replace(cluster, pools=(_shared_out(cluster.pools[0], ranks),))
    most = sum(pool.node.num_chips for pool in cluster.pools)
    first = cluster.pools[0]
    if len(cluster.pools) > 1 or ranks > first.node.num_chips:
        if ranks == most:
            return cluster
        raise InputError(
            f"--ranks {ranks}: this machine has {many(most, 'accelerator')}"
            + (" of several kinds; leave --ranks out" if len(cluster.pools) > 1 else "")
        )
    return replace(cluster, pools=(_with_chips(first, ranks),))


def _with_chips(pool: Pool, count: int) -> Pool:
    """Return a pool with the first chips of its node."""
    islands = tuple(
        replace(island, slots=island.slots.below(count))
        for island in pool.node.islands
        if len(island.slots.below(count)) > 1
    )
    return replace(pool, node=replace(pool.node, num_chips=count, islands=islands))


def _shared_out(pool: Pool, ranks: int) -> Pool:
    if ranks == 1:
        return pool
    chip, node = pool.node.chip, pool.node
    part = replace(
        chip,
        name=f"{chip.name}-of-{ranks}",
        peak={dtype: flops / ranks for dtype, flops in chip.peak.items()},
        memory_bytes=chip.memory_bytes / ranks,
        memory_bandwidth=chip.memory_bandwidth / ranks,
        compute_units=max(1, chip.compute_units // ranks),
    )
    island = Island(
        kind="shared memory",
        slots=Slots(tuple(range(ranks))),
        bandwidth=_SHARED_BANDWIDTH / ranks,
        latency_s=_SHARED_LATENCY_S,
    )
    return replace(pool, node=replace(node, chip=part, num_chips=ranks, islands=(island,)))


def has_bf16(root: Path = Path("/")) -> bool:
    """Tell whether this machine's CPU has instructions for bfloat16."""
    try:
        info = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return Dtype.BF16 in cpu_chip(info, find_host(root)).peak


def is_cpu(chip: Chip) -> bool:
    """Tell whether a chip is a host's own processor, and computes as such."""
    return not chip.emulated and chip.vendor.casefold() in _CPU_VENDORS
