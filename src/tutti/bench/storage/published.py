"""Llama-3 405B on 16,384 chips against storage that others have published, in one table.

Meta's file system kept 2 TB/s up for the training of Llama 3 (7 TB/s at its peak). AIPod names a
parallel file system of 200 GB/s and an object client of 10 GB/s; as the letter B is easily meant
as bits, both are read as Gb/s, too. Every rate is taken as that of the whole storage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tutti.cost.storage.checkpoints import (
    CheckpointFacts,
    checkpoint_bytes,
    restore_seconds,
    safe_seconds,
    stall_seconds,
    tier_times,
)
from tutti.cost.storage.failures import FailureFacts, best_interval
from tutti.cost.storage.prediction import checkpoint_facts
from tutti.document import Place
from tutti.hardware.cluster import Cluster
from tutti.hardware.storage import Storage, StorageTarget
from tutti.models.load import load_model
from tutti.plan.job import PRECISIONS, Job
from tutti.plan.uniform import Degrees, uniform_plan

GB, GBIT = 1e9, 1e9 / 8
STORAGES = {
    "2 TB/s (Llama 3's file system)": 2000 * GB,
    "200 GB/s (AIPod's file system)": 200 * GB,
    "200 Gb/s (the same, as bits)": 200 * GBIT,
    "10 GB/s (AIPod's object client)": 10 * GB,
    "10 Gb/s (the same, as bits)": 10 * GBIT,
}
INTERRUPTIONS, DAYS = 419, 54  # unexpected ones of Llama 3's run, and its days
RESTART_S = 600.0  # assumed: noticing, new nodes, starting 16,384 processes
DEGREES = "tp=8,pp=16,dp=128,shard=1"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRow:
    """What one storage means for the job."""

    storage: str
    load_each_s: float  # weights in bf16, every replica reads them
    load_broadcast_s: float  # they are read once and handed on
    checkpoint_s: float  # until it is safe
    stall_s: float
    restart_s: float  # restore, and what a restart takes besides
    save_every_s: float
    hours_lost_per_day: float


def published_rows() -> Iterator[PublishedRow]:
    """Yield a row for each storage."""
    model = load_model("llama-3.1-405b")
    cluster = Cluster.from_document(
        {"name": "llama-3", "pools": [{"name": "h100", "chip": "H100", "nodes": 2048}]},
        Place("published"),
    )
    job = Job(sequence_length=8192, global_batch=2048, precision=PRECISIONS["bf16"])
    plan = uniform_plan(model, cluster, job, Degrees.parse(DEGREES))
    size = checkpoint_bytes(job, model)
    facts = checkpoint_facts(plan, cluster, size)
    weights = 2.0 * model.num_parameters
    loads = CheckpointFacts(
        num_bytes=weights,
        kept_bytes=128 * weights,
        ranks=facts.ranks,
        clients=facts.clients,
        copy_rate=facts.copy_rate,
        network_rate=facts.network_rate,
    )
    for name, rate in STORAGES.items():
        target = StorageTarget(read_bandwidth=rate, write_bandwidth=rate)
        loading = restore_seconds(target, loads)
        times = list(tier_times(Storage(file_system=target), facts))
        safe = safe_seconds(times)
        assert safe is not None
        restore = restore_seconds(target, facts).seconds
        failures = FailureFacts(
            mean_time_s=DAYS * 86_400.0 / INTERRUPTIONS,
            stall_s=stall_seconds(facts),
            safe_s=safe,
            restart_s=RESTART_S + restore,
        )
        saving = best_interval(failures)
        yield PublishedRow(
            storage=name,
            load_each_s=loading.each_s,
            load_broadcast_s=loading.broadcast_s,
            checkpoint_s=safe,
            stall_s=failures.stall_s,
            restart_s=failures.restart_s,
            save_every_s=saving.interval_s,
            hours_lost_per_day=saving.hours_lost_per_day,
        )
