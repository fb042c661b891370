"""Seconds of file traffic: reading data, writing and reading checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from tutti.hardware.cluster import Cluster
from tutti.hardware.fabric import StorageTarget
from tutti.models.spec import ModelSpec
from tutti.plan.job import MOMENTS
from tutti.plan.plan import Plan

TOKEN_BYTES = 4  # a token id as files hold it


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageSeconds:
    """File traffic; None where the cluster file says nothing of its storage."""

    data_per_step: float | None
    checkpoint_bytes: float
    checkpoint_write: float | None
    checkpoint_read: float | None


def storage_seconds(plan: Plan, model: ModelSpec, cluster: Cluster) -> StorageSeconds:
    """Return what a step's data and a whole checkpoint take."""
    target = cluster.storage.file_system or cluster.storage.object_store
    precision = plan.job.precision
    per_parameter = precision.parameters.num_bytes
    if precision.master is not None:
        per_parameter += precision.master.num_bytes
    per_parameter += len(MOMENTS[plan.job.optimizer]) * precision.moments.num_bytes
    adapts = model.tuning is not None and model.tuning.adapter is not None
    size = (model.num_trained if adapts else model.num_parameters) * per_parameter
    nodes = len({(chip.pool, chip.node) for _, _, stage in plan.stages() for chip in stage.chips})
    if target is None:
        return StorageSeconds(
            data_per_step=None, checkpoint_bytes=size, checkpoint_write=None, checkpoint_read=None
        )
    return StorageSeconds(
        data_per_step=plan.job.tokens * TOKEN_BYTES / _rate(target, target.read_bandwidth, nodes),
        checkpoint_bytes=size,
        checkpoint_write=size / _rate(target, target.write_bandwidth, nodes),
        checkpoint_read=size / _rate(target, target.read_bandwidth, nodes),
    )


def _rate(target: StorageTarget, whole: float, nodes: int) -> float:
    if target.per_node_bandwidth is None:
        return whole
    return min(whole, target.per_node_bandwidth * nodes)
