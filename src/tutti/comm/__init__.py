"""Collectives across unlike chips: executes the programs of `collective` over real links.

    communicator = connect(store, rank, world)
    communicator.all_reduce(tensor).wait()

Native libraries inside an island, shared memory inside a host, sockets between hosts, pinned host
memory between a device and either. `comm` invents no algorithm and makes no choice: `collective`
writes the programs, `cost` chooses among them.
"""

from tutti.comm.communicator import Communicator
from tutti.comm.connect import connect
from tutti.comm.errors import (
    ClosedError,
    CommError,
    CommTimeoutError,
    DisagreementError,
    PeerLostError,
)
from tutti.comm.places import Place, Topology, place_of
from tutti.comm.transport.link import Settings, register_transport
from tutti.comm.work import Work

__all__ = [
    "ClosedError",
    "CommError",
    "CommTimeoutError",
    "Communicator",
    "DisagreementError",
    "PeerLostError",
    "Place",
    "Settings",
    "Topology",
    "Work",
    "connect",
    "place_of",
    "register_transport",
]
