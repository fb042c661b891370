"""Where the chips of an elastic job are."""

from __future__ import annotations

from tutti.launch.identity import used_chips
from tutti.train.run.planning import Job

HEARTBEAT_S_PER_HOST = 0.25 / 512  # so that listening to many takes a small part of a core


def nodes_of(job: Job) -> list[str]:
    """Return the nodes of a job's cluster."""
    return [f"{pool.name}/{node}" for pool in job.cluster.pools for node in range(pool.nodes)]


def many_hosts_s(job: Job) -> float:
    """Return the least time between two heartbeats of a host, given how many there are."""
    return HEARTBEAT_S_PER_HOST * len(nodes_of(job))


def chips_of_node(job: Job, node: str) -> tuple[str, ...]:
    """Return the chips of a node; none where there is no such node."""
    if node not in nodes_of(job):
        return ()
    pool = job.cluster.pool(node.split("/")[0])
    return tuple(f"{node}/{slot}" for slot in range(pool.node.num_chips))


def chips_here(job: Job) -> tuple[str, ...]:
    """Return the chips of a job that runs on one machine: all of the nodes that its plan uses."""
    used = [f"{chip.pool}/{chip.node}" for chip in used_chips(job.plan)]
    return tuple(chip for node in dict.fromkeys(used) for chip in chips_of_node(job, node))
