"""The figures of a simulated fleet, by which policies are compared."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tutti.fleet.simulate import History, JobHistory


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFigures:
    """One trace under one policy."""

    policy: str
    jobs: int
    wait_mean_s: float
    wait_p95_s: float
    completion_mean_s: float
    completion_p95_s: float
    makespan_s: float
    utilisation: float  # chip-seconds in use ÷ there, while jobs came
    busy_utilisation: float  # the same, while somebody waited
    fragmentation: float  # of free nodes, those that the roomiest group lacks
    multi_node_jobs: int
    spread_jobs: float  # of those, in more groups than they need for most of their time
    groups_over_fewest: float  # groups per multi-node job ÷ the fewest possible, over its time
    network_share: float  # of running time, by which the network made steps longer
    moves: int
    preemptions: int
    lost: int  # jobs taken down by nodes, each time

    def to_document(self) -> dict[str, Any]:
        """Return the written form."""
        return asdict(self)


def figures(history: History) -> FleetFigures:
    """Return the figures of what happened."""
    done = [job for job in history.jobs.values() if job.end >= 0]
    waits = np.array([job.wait_s for job in done])
    completions = np.array([job.completion_s for job in done])
    lying = [_lying(history, job) for job in done]
    multi = [one for one in lying if one is not None]
    running = sum(spell.end - spell.start for job in done for spell in job.spells)
    chips = history.grounds.num_chips
    return FleetFigures(
        policy=history.policy.name, jobs=len(done),
        wait_mean_s=float(waits.mean()), wait_p95_s=float(np.percentile(waits, 95)),
        completion_mean_s=float(completions.mean()),
        completion_p95_s=float(np.percentile(completions, 95)),
        makespan_s=history.end,
        utilisation=_share(history.used_chip_s, chips * history.last_submit),
        busy_utilisation=_share(history.waiting_used_chip_s, chips * history.waiting_s),
        fragmentation=_share(history.fragmented_s, history.free_s),
        multi_node_jobs=len(multi),
        spread_jobs=_share(sum(spread for spread, _ in multi), len(multi)),
        groups_over_fewest=_share(sum(ratio for _, ratio in multi), len(multi)) or 1.0,
        network_share=_share(sum(job.network_s for job in done), running),
        moves=sum(job.moves for job in done), preemptions=sum(job.preempted for job in done),
        lost=sum(job.lost for job in done),
    )  # fmt: skip


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _lying(history: History, job: JobHistory) -> tuple[bool, float] | None:
    """Return whether a job lay in more groups than it needed most of the time, and how many more.

    None for jobs of one node.
    """
    grounds = history.grounds
    spread = total = ratio = 0.0
    for spell in job.spells:
        shape = job.request.shapes[spell.allocation.shape]
        if shape.num_nodes == 1:
            return None
        seconds = max(spell.end - spell.start, 1e-9)
        groups, fewest = grounds.spread(spell.allocation.mask), grounds.fewest(shape)
        total += seconds
        ratio += seconds * groups / fewest
        spread += seconds if groups > fewest else 0.0
    return (spread > total / 2, ratio / total) if total else None
