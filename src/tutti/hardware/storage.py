"""Where data and checkpoints lie: shared targets, tiers in every node, and the way there.

Facts only. What a checkpoint or a step's data take is worked out in `cost.storage`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from tutti.document import Above, Bytes, BytesPerSecond, Seconds

PerSecond = Annotated[float, Above(0)]


class StorageNetwork(StrEnum):
    """Over which NICs a node reaches its storage."""

    OWN = "own"  # NICs that training leaves alone
    TRAINING = "training"  # those over which collectives run: both share them


class StorageTier(StrEnum):
    """Where bytes can lie, from the nearest to the farthest."""

    HOST_MEMORY = "host_memory"
    LOCAL_DISK = "local_disk"
    FILE_SYSTEM = "file_system"
    OBJECT_STORE = "object_store"

    @property
    def words(self) -> str:
        """The tier as people say it."""
        return self.value.replace("_", " ")

    @property
    def survives_a_node(self) -> bool:
        """Whether what lies there is still there when a node is lost."""
        return self in (StorageTier.FILE_SYSTEM, StorageTier.OBJECT_STORE)


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageTarget:
    """A file system or an object store: bytes per second in all, and per node at most."""

    read_bandwidth: BytesPerSecond
    write_bandwidth: BytesPerSecond
    per_node_bandwidth: BytesPerSecond | None = None
    latency_s: Seconds = 0.0
    """Of one operation, before its bytes come."""
    operations_per_second: PerSecond | None = None
    """Files opened, or objects asked for, by all nodes together; left out: no limit is known."""
    network: StorageNetwork = StorageNetwork.OWN
    capacity: Bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStorage:
    """Memory or a disk in every node, for that node alone."""

    read_bandwidth: BytesPerSecond
    write_bandwidth: BytesPerSecond
    latency_s: Seconds = 0.0
    operations_per_second: PerSecond | None = None
    capacity: Bytes | None = None


AnyTarget = StorageTarget | NodeStorage


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Where data and checkpoints lie."""

    host_memory: NodeStorage | None = None
    local_disk: NodeStorage | None = None
    file_system: StorageTarget | None = None
    object_store: StorageTarget | None = None

    @property
    def shared(self) -> StorageTarget | None:
        """Where everybody reads data and checkpoints: the file system, else the object store."""
        return self.file_system or self.object_store

    def tiers(self) -> Iterator[tuple[StorageTier, AnyTarget]]:
        """Yield the tiers that there are, the nearest first."""
        for tier in StorageTier:
            target: AnyTarget | None = getattr(self, tier.value)
            if target is not None:
                yield tier, target
