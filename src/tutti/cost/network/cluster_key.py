"""A cluster as a dictionary key: equal to itself only, without hashing all its facts."""

from __future__ import annotations

from tutti.hardware.cluster import Cluster


class ClusterKey:
    """Stands for one cluster object, and keeps it alive."""

    __slots__ = ("cluster",)

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def __hash__(self) -> int:
        return id(self.cluster)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClusterKey) and other.cluster is self.cluster
