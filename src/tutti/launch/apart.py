"""Pools of different chips that a scheduler cannot tell apart by what the job asks for."""

from __future__ import annotations

from collections.abc import Callable

from tutti.launch.facts import PoolLaunch, resolve
from tutti.launch.job import Job
from tutti.plan.check import embedded_cluster


def mistaken_pools(
    job: Job,
    called: Callable[[PoolLaunch], str],
    apart: Callable[[PoolLaunch, PoolLaunch], bool],
) -> list[PoolLaunch]:
    """Return the pools of the job that may be given hosts of another pool, which has other chips.

    `called` is the scheduler's name of a pool's chips; `apart` tells whether what the first pool
    asks for keeps it from the second one's hosts. Pools that the plan leaves idle count too: their
    hosts are there to be given.
    """
    everyone = [resolve(job.facts, pool) for pool in embedded_cluster(job.plan).pools]
    used = dict.fromkeys(part.launch.pool.name for part in job.parts)
    mine = {launch.pool.name: launch for launch in everyone}
    return [
        mine[name]
        for name in used
        if called(mine[name])
        and any(
            other.pool.chip.name != mine[name].pool.chip.name
            and called(other) == called(mine[name])
            and not apart(mine[name], other)
            for other in everyone
        )
    ]
