"""Bytes and seconds of checkpoints: written once over all replicas, staged through the tiers.

Every number is written by one of the ranks that keep it, so that a checkpoint has the same size
under any plan and all nodes write at once. Training stands still only while the state is copied to
the hosts; from there it goes from tier to tier in the background. It is safe when it lies where
the loss of a node cannot reach it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tutti.cost.memory.optimizer_memory import means_bytes
from tutti.cost.storage.targets import Clients, read_seconds, write_seconds
from tutti.hardware.storage import Storage, StorageTarget, StorageTier
from tutti.models.spec import ModelSpec
from tutti.plan.job import AVERAGE_BYTES, MOMENTS, Job

SERIAL_OPERATIONS = 10
"""That a save waits for one after the other: the ranks' files, metadata, plan, manifest, the names
of folders, the checkpoint's own name, what points to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    """What of a job decides how long its checkpoints take."""

    num_bytes: float  # of a whole checkpoint
    kept_bytes: float  # that all ranks together need of one: replicas need the same bytes
    ranks: int
    clients: Clients
    copy_rate: float  # from one chip to its host
    network_rate: float  # of what ranks send each other, of one chip
    checksum_rate: float | None = None  # of one process; None: not measured, and not counted


@dataclass(frozen=True, slots=True, kw_only=True)
class TierTime:
    """When a checkpoint lies in a tier, counted from the save."""

    tier: StorageTier
    seconds: float  # of this tier alone
    done_s: float  # since the save began
    fits: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreTime:
    """How long ranks take to get a checkpoint back."""

    each_s: float  # every rank reads what it needs
    broadcast_s: float  # every byte is read once and handed on

    @property
    def broadcast_is_cheaper(self) -> bool:
        """Whether ranks should read for each other."""
        return self.broadcast_s < self.each_s

    @property
    def seconds(self) -> float:
        """The cheaper of both."""
        return min(self.each_s, self.broadcast_s)


def state_bytes(job: Job) -> float:
    """Return the bytes that a checkpoint has of each parameter: its weight and the moments."""
    precision = job.precision
    weight = precision.master if precision.master is not None else precision.parameters
    # codes are written as the numbers that they stand for: any plan can read those
    moments = job.decoded_bytes or len(MOMENTS[job.optimizer]) * precision.moments.num_bytes
    return weight.num_bytes + moments + (AVERAGE_BYTES if job.average else 0.0)


def checkpoint_bytes(job: Job, model: ModelSpec) -> float:
    """Return the bytes of a whole checkpoint."""
    adapts = model.tuning is not None and model.tuning.adapter is not None
    each = (model.num_trained if adapts else model.num_parameters) * state_bytes(job)
    return each + sum(means_bytes(job, model, unit, 1) for unit in range(model.num_units))


def stall_seconds(facts: CheckpointFacts) -> float:
    """Return how long training stands still: every chip copies its share to its host."""
    return facts.num_bytes / facts.ranks / facts.copy_rate


def tier_times(storage: Storage, facts: CheckpointFacts) -> Iterator[TierTime]:
    """Yield when a checkpoint lies in each tier, the nearest first."""
    done = stall_seconds(facts)
    before: float | None = None  # bytes per second at which the tier before is read
    summed = False
    for tier, target in storage.tiers():
        seconds = write_seconds(
            target, facts.num_bytes, facts.clients, facts.ranks, beside_training=True
        )
        if before is not None:
            seconds = max(seconds, facts.num_bytes / before)
        if tier is not StorageTier.HOST_MEMORY:
            seconds += (SERIAL_OPERATIONS - 1) * target.latency_s
        if tier is not StorageTier.HOST_MEMORY and not summed:
            seconds += _checksums(facts, facts.num_bytes)  # once, as files are made of it
            summed = True
        done += seconds
        nodes = 1 if isinstance(target, StorageTarget) else facts.clients.nodes
        fits = target.capacity is None or facts.num_bytes <= target.capacity * nodes
        yield TierTime(tier=tier, seconds=seconds, done_s=done, fits=fits)
        before = facts.clients.limited(target, target.read_bandwidth)


def safe_seconds(times: list[TierTime]) -> float | None:
    """Return when a checkpoint outlives a node; None where no tier is shared."""
    safe = [time.done_s for time in times if time.tier.survives_a_node]
    return min(safe) if safe else None


def restore_seconds(target: StorageTarget, facts: CheckpointFacts) -> RestoreTime:
    """Return what both ways of reading a checkpoint take; files are opened by every rank."""
    each = read_seconds(target, facts.kept_bytes, facts.clients, 2.0 * facts.ranks)
    once = read_seconds(target, facts.num_bytes, facts.clients, 2.0 * facts.ranks)
    again = max(0.0, facts.kept_bytes - facts.num_bytes) / facts.ranks / facts.network_rate
    check = _checksums(facts, facts.kept_bytes)
    return RestoreTime(each_s=each + check, broadcast_s=once + again + check)


def _checksums(facts: CheckpointFacts, num_bytes: float) -> float:
    if facts.checksum_rate is None:
        return 0.0
    return num_bytes / facts.ranks / facts.checksum_rate
