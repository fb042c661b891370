"""What a plan's files take: data beside the step, checkpoints, restores, start, a day's losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tutti.cost.memory.instruction_memory import StaticBytes
from tutti.cost.storage.checkpoints import (
    CheckpointFacts,
    RestoreTime,
    TierTime,
    checkpoint_bytes,
    restore_seconds,
    safe_seconds,
    stall_seconds,
    tier_times,
)
from tutti.cost.storage.failures import (
    FailureFacts,
    SavingInterval,
    best_interval,
    mean_time_between_failures,
    nodes_by_pool,
)
from tutti.cost.storage.targets import (
    Clients,
    checksum_rate,
    measured_storage,
    read_seconds,
)
from tutti.hardware.cluster import Cluster
from tutti.hardware.profile import Profile
from tutti.hardware.storage import Storage, StorageNetwork, StorageTarget
from tutti.models.spec import ModelSpec
from tutti.plan.plan import Plan
from tutti.units import rate_text, seconds_text

TOKEN_BYTES = 4  # a token id as files hold it


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageSeconds:
    """File traffic; None where the cluster file says nothing of its storage, or of failures."""

    checkpoint_bytes: float
    data_per_step: float | None = None
    checkpoint_write: float | None = None  # until it outlives a node
    checkpoint_read: float | None = None  # by the cheaper way
    stall: float | None = None
    tiers: tuple[TierTime, ...] = ()
    restore: RestoreTime | None = None
    start: float | None = None  # from nothing to the first step, with the restart of its pools
    mean_time_between_failures: float | None = None
    saving: SavingInterval | None = None
    stretched_step: float | None = None  # while a checkpoint shares the NICs of training
    warnings: tuple[str, ...] = ()


def storage_seconds(
    plan: Plan,
    model: ModelSpec,
    cluster: Cluster,
    *,
    step_s: float = 0.0,
    exposed_s: float = 0.0,
    statics: Sequence[tuple[StaticBytes, int]] = (),
    profiles: Sequence[Profile] = (),
) -> StorageSeconds:
    """Return what a plan's files take.

    `statics` are the bytes of each class of ranks with its number of ranks; `exposed_s` is what of
    a step waits for the network.
    """
    size = checkpoint_bytes(plan.job, model)
    facts = checkpoint_facts(plan, cluster, size, statics, profiles)
    widest = max(cluster.pool(name).node.num_chips for name in _pools(plan))
    storage = measured_storage(cluster.storage, profiles, widest)
    target = storage.shared
    tiers = tuple(tier_times(storage, facts))
    mean_time = mean_time_between_failures(plan, cluster)
    seconds = StorageSeconds(
        checkpoint_bytes=size,
        stall=stall_seconds(facts) if tiers else None,
        tiers=tiers,
        checkpoint_write=safe_seconds(list(tiers)),
        mean_time_between_failures=mean_time,
    )
    if target is not None:
        seconds = _with_target(seconds, plan, cluster, target, facts)
        seconds = _with_failures(seconds, step_s, _restart(plan, cluster))
        seconds = replace(seconds, stretched_step=_stretched(target, facts, step_s, exposed_s))
    return replace(seconds, warnings=tuple(_warnings(seconds, plan, storage, step_s)))


def checkpoint_facts(
    plan: Plan,
    cluster: Cluster,
    size: float,
    statics: Sequence[tuple[StaticBytes, int]] = (),
    profiles: Sequence[Profile] = (),
) -> CheckpointFacts:
    """Return what of a plan decides how long its checkpoints take."""
    types = [cluster.pool(pool).node for pool in _pools(plan)]
    own = plan.job.precision.master is None
    kept = sum(
        (static.optimizer + (static.parameters if own else 0.0)) * ranks
        for static, ranks in statics
    )
    nics = [sum(nic.rate for nic in node.nics) for node in types]
    hosts = [node.host.memory_bandwidth * node.hosts / node.num_chips for node in types]
    chip_nics = [node.nic_rate(0) if node.nics else host
                 for node, host in zip(types, hosts, strict=True)]  # fmt: skip
    return CheckpointFacts(
        num_bytes=size,
        kept_bytes=max(size, kept),
        ranks=plan.num_ranks,
        clients=Clients(
            nodes=sum(nodes_by_pool(plan).values()), nic_rate=min(nics) if all(nics) else None
        ),
        copy_rate=min(
            min(node.host.device_bandwidth, fair) for node, fair in zip(types, hosts, strict=True)
        ),
        network_rate=min(chip_nics),
        checksum_rate=checksum_rate(profiles),
    )


def _pools(plan: Plan) -> list[str]:
    return sorted(nodes_by_pool(plan))


def _restart(plan: Plan, cluster: Cluster) -> float:
    return max(cluster.pool(name).restart_s for name in _pools(plan))


def _with_target(
    seconds: StorageSeconds,
    plan: Plan,
    cluster: Cluster,
    target: StorageTarget,
    facts: CheckpointFacts,
) -> StorageSeconds:
    data = read_seconds(target, plan.job.tokens * TOKEN_BYTES, facts.clients)
    restore = restore_seconds(target, facts)
    return replace(
        seconds,
        data_per_step=data,
        restore=restore,
        checkpoint_read=restore.seconds,
        start=_restart(plan, cluster) + restore.seconds + data,
    )


def _with_failures(seconds: StorageSeconds, step_s: float, restart_s: float) -> StorageSeconds:
    safe, mean_time = seconds.checkpoint_write, seconds.mean_time_between_failures
    if safe is None or mean_time is None or seconds.stall is None or seconds.restore is None:
        return seconds
    facts = FailureFacts(
        mean_time_s=mean_time,
        stall_s=seconds.stall,
        safe_s=safe,
        restart_s=restart_s + seconds.restore.seconds,
        step_s=step_s,
    )
    return replace(seconds, saving=best_interval(facts))


def _stretched(
    target: StorageTarget, facts: CheckpointFacts, step_s: float, exposed_s: float
) -> float | None:
    """Return how long a step is while a checkpoint goes over the NICs that it needs itself."""
    clients = facts.clients
    if target.network is not StorageNetwork.TRAINING or clients.nic_rate is None or not step_s:
        return None
    share = target.write_bandwidth / clients.nodes
    if target.per_node_bandwidth is not None:
        share = min(share, target.per_node_bandwidth)
    _, left = clients.flow(share, clients.nic_rate, beside_training=True)
    return step_s + exposed_s * (clients.nic_rate / left - 1.0)


def _warnings(
    seconds: StorageSeconds, plan: Plan, storage: Storage, step_s: float
) -> Sequence[str]:
    said = []
    target = storage.shared
    data = seconds.data_per_step
    if target is not None and data is not None and step_s and data > step_s:
        need = plan.job.tokens * TOKEN_BYTES / step_s
        gets = plan.job.tokens * TOKEN_BYTES / data
        said.append(
            f"storage is slower than the step needs: its data take {seconds_text(data)} of "
            f"{seconds_text(step_s)}; {rate_text(need)} are needed, {rate_text(gets)} come"
        )
    said += [
        f"a checkpoint does not fit on the {tier.tier.words}; leave that tier out"
        for tier in seconds.tiers
        if not tier.fits
    ]
    if seconds.saving is not None and seconds.saving.lost_share >= 1.0:
        said.append("failures come faster than the job restarts: nothing would ever be done")
    return said
