"""Chips, nodes, pools, fabrics and clusters: what a person owns, as files and frozen facts."""

from tutti.hardware.chip import Chip, Dtype
from tutti.hardware.cluster import Cluster
from tutti.hardware.fabric import CrossKind, CrossLink, Fabric, Tier
from tutti.hardware.node import Bridge, Host, Island, Nic, NodeType
from tutti.hardware.pool import Pool
from tutti.hardware.profile import Profile
from tutti.hardware.slots import Slots
from tutti.hardware.storage import NodeStorage, Storage, StorageTarget
from tutti.hardware.topology import Link, LinkKind, Position

__all__ = [
    "Bridge",
    "Chip",
    "Cluster",
    "CrossKind",
    "CrossLink",
    "Dtype",
    "Fabric",
    "Host",
    "Island",
    "Link",
    "LinkKind",
    "Nic",
    "NodeStorage",
    "NodeType",
    "Pool",
    "Position",
    "Profile",
    "Slots",
    "Storage",
    "StorageTarget",
    "Tier",
]
