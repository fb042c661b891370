"""connect: from a store, a rank and a secret to a communicator of all ranks.

Ranks tell each other their places through the store, check that they agree (versions, settings,
overrides), and build the same topology: a rank with another idea of the job is named, instead of
hanging all. Sub-groups are made by their members alone, without a word: a group's number is a hash
of who is in it, so that thousands of ranks with thousands of groups ask nobody for anything.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import hashlib
import json
import os
import secrets
import socket
import uuid
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch._C._distributed_c10d import Store as TorchStore

from tutti.accelerator import Accelerator
from tutti.comm.choice import VARIABLE, Chooser
from tutti.comm.communicator import Communicator
from tutti.comm.edge_rates import Measured, Profiles, comm_links
from tutti.comm.entry.store import Store
from tutti.comm.entry.trust import Key
from tutti.comm.errors import DisagreementError, PeerLostError
from tutti.comm.executor import Executor
from tutti.comm.frames import PROTOCOL
from tutti.comm.launch import Shared
from tutti.comm.mesh import Listeners
from tutti.comm.move import Buffers, DeviceMover, HostMover
from tutti.comm.native import make_group
from tutti.comm.places import Place, Topology
from tutti.comm.reactor import Reactor, near_processors
from tutti.comm.transport import shared as shared_memory
from tutti.comm.transport import tcp
from tutti.comm.transport.link import LinkOwner, Settings
from tutti.cost.network.tuned_programs import Tuned
from tutti.errors import InputError
from tutti.launch.secret import Secret, all_here, find_secret

ADDRESSES = "TUTTI_COMM_ADDRESSES"  # one per NIC, comma-separated


def this_host() -> str:
    """Return what processes that can share memory have in common: machine and network namespace."""
    with contextlib.suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            machine = file.read().strip()
        return f"{machine}/{os.stat('/proc/self/ns/net').st_ino}"
    return f"{socket.gethostname()}/{uuid.getnode():x}"


def _own_addresses() -> tuple[str, ...]:
    given = os.environ.get(ADDRESSES, "")
    if given:
        return tuple(part.strip() for part in given.split(",") if part.strip())
    if all_here(os.environ):
        return ("127.0.0.1",)
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, 9))  # sends nothing; tells which address of ours leads there
        return (str(probe.getsockname()[0]),)
    return ("127.0.0.1",)


def connect(
    store: Store,
    rank: int,
    world: int,
    *,
    place: Place | None = None,
    accelerator: Accelerator | None = None,
    settings: Settings | None = None,
    profile: Profiles | None = None,
    timeout_s: float = 300.0,
    start_timeout_s: float = 120.0,
    secret: Secret | None = None,
    stranger: Callable[[str], None] | None = None,
) -> Communicator:
    """Return the communicator of all `world` ranks.

    `place` says what is known of this rank's island, rail, NIC and addresses; what it leaves out is
    found. `accelerator` is needed for device tensors. `profile` holds measured links and programs,
    of all chips or of each kind by its name, as the places call it.
    `timeout_s` is how long an operation may be without progress. `secret` is what the ranks prove
    to each other on every connection; it is found in the environment unless it is given. `stranger`
    is told who was turned away (by default, the log).
    """
    if not 0 <= rank < world:
        raise InputError(f"rank {rank} of {world}; ranks count from 0")
    settings = settings or Settings()
    if secret is None:
        secret = find_secret(os.environ, world)
    known = place or Place()
    if not known.host:
        known = dataclasses.replace(known, host=this_host())
    if known.addresses == ("127.0.0.1",):
        known = dataclasses.replace(known, addresses=_own_addresses())
    listeners, known = _listen(known, rank)
    start, measured = _Start(store, rank, world, start_timeout_s), Measured(profile)
    try:
        key = Key(secret, "mesh", start.session())
        topology = start.topology(known)
        start.agree(
            protocol=PROTOCOL,
            torch=torch.__version__.split("+")[0],
            settings=dataclasses.asdict(settings),
            topology=topology.fingerprint(),
            overrides=os.environ.get(VARIABLE, ""),
            links=measured.fingerprint(),
        )
    except BaseException:
        listeners.close()
        raise
    return _Job(store, rank, topology, settings, accelerator, measured, timeout_s).open(
        listeners, key, stranger
    )


def _listen(place: Place, rank: int) -> tuple[Listeners, Place]:
    """Open the sockets on which this rank is reached, and say where in its place."""
    server = _listen_at(place.addresses)
    local, name = None, ""
    if hasattr(os, "memfd_create") and hasattr(socket, "send_fds"):
        name = f"tutti-{os.getpid()}-{rank}-{uuid.uuid4().hex[:8]}"
        local = shared_memory.listen(name)
    port = server.getsockname()[1]
    return Listeners(server, local), dataclasses.replace(place, port=port, local_name=name)


def _listen_at(addresses: tuple[str, ...]) -> socket.socket:
    """Listen where others reach this rank, and nowhere else where that can be."""
    if len(addresses) == 1:
        with contextlib.suppress(OSError):  # declared, but an address of somebody in between
            return tcp.listen(addresses[0])
    elif all(address.startswith("127.") for address in addresses):
        return tcp.listen("127.0.0.1")
    return tcp.listen("::" if ":" in addresses[0] else "0.0.0.0")


class _Start:
    """What ranks settle through the store before they talk to each other."""

    def __init__(self, store: Store, rank: int, world: int, timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._world = world
        self._timeout_s = timeout_s

    def session(self) -> str:
        """Return a name that no other start of the job, nor another job, has."""
        if self._rank == 0:
            self._store.set("tutti/session", secrets.token_hex(16))
        self._wait(["tutti/session"], [0])
        return self._store.get("tutti/session").decode()

    def topology(self, place: Place) -> Topology:
        """Exchange places."""
        values = self._share("place", json.dumps(place.to_document()))
        return Topology(tuple(Place.from_document(json.loads(value)) for value in values))

    def agree(self, **facts: Any) -> None:
        """Raise unless all ranks have the same facts."""
        mine = json.dumps(facts, sort_keys=True)
        for rank, value in enumerate(self._share("facts", mine)):
            if value == mine:
                continue
            theirs = json.loads(value)
            what = next(name for name in facts if theirs.get(name) != json.loads(mine)[name])
            raise DisagreementError(
                f"rank {self._rank}: rank {rank} has another '{what}': {theirs.get(what)!r}, "
                f"here {facts[what]!r}; start all ranks alike",
                rank=self._rank,
                peer=rank,
            )

    def _share(self, what: str, mine: str) -> list[str]:
        keys = [f"tutti/{what}/{rank}" for rank in range(self._world)]
        self._store.set(keys[self._rank], mine)
        self._wait(keys, list(range(self._world)))
        return [self._store.get(key).decode() for key in keys]

    def _wait(self, keys: list[str], ranks: list[int]) -> None:
        try:
            self._store.wait(keys, timedelta(seconds=self._timeout_s))
        except (RuntimeError, dist.DistError) as error:
            missing = ranks
            with contextlib.suppress(RuntimeError, dist.DistError):
                missing = [
                    rank
                    for key, rank in zip(keys, ranks, strict=True)
                    if not self._store.check([key])
                ]
            names = ", ".join(map(str, missing[:16]))
            raise PeerLostError(
                f"rank {self._rank}: after {self._timeout_s:g} s these ranks have not come: "
                f"{names}",
                rank=self._rank,
                peer=missing[0] if missing else None,
            ) from error


class _Job:
    """The communicators of one job on this rank."""

    def __init__(
        self,
        store: Store,
        rank: int,
        topology: Topology,
        settings: Settings,
        accelerator: Accelerator | None,
        measured: Measured,
        timeout_s: float,
    ) -> None:
        self._store = store
        self._rank = rank
        self._topology = topology
        self._settings = settings
        host_only = accelerator is None or accelerator.device.type == "cpu"
        self._accelerator = None if host_only and not _staged(accelerator) else accelerator
        self._measured = measured
        self._timeout_s = timeout_s
        self._made: dict[tuple[tuple[int, ...], str], int] = {}  # how often, by ranks and name
        self._shared: Shared | None = None

    def open(
        self, listeners: Listeners, key: Key, stranger: Callable[[str], None] | None
    ) -> Communicator:
        """Start the executor and return the communicator of all ranks."""
        place = self._topology.places[self._rank]
        reactor = Reactor(f"tutti-comm-{self._rank}", processors=near_processors(place.numa))
        accelerator = self._accelerator
        mover = None if accelerator is None else DeviceMover(accelerator, reactor)
        owner = LinkOwner(
            rank=self._rank,
            key=key,
            settings=self._settings,
            reactor=reactor,
            host_mover=HostMover(),
            device_mover=mover,
            accelerator=accelerator,
            buffers=Buffers(accelerator),
            replied=lambda *_: None,
            broken=lambda *_: None,
        )
        executor = Executor(owner, self._topology, listeners, stranger)
        self._shared = Shared(
            executor=executor,
            accelerator=accelerator,
            emulated=_staged(accelerator),
            timeout_s=self._timeout_s,
            close=lambda: _close(executor, mover),
        )
        reference = weakref.ref(executor)
        atexit.register(lambda: _close(reference(), None))
        world = self.group(range(self._topology.size))
        assert world is not None
        return world

    def group(
        self, ranks: Sequence[int], name: str = "", control_s: float | None = None
    ) -> Communicator | None:
        """Return a communicator of some ranks; only they need to call this.

        With `control_s` its messages are between hosts, whatever the chips, and that is its
        time-out.
        """
        group = self._topology.group(ranks)
        if self._rank not in group.ranks:
            return None
        key = (tuple(sorted(group.ranks)), name)
        self._made[key] = self._made.get(key, 0) + 1
        number = group_number(*key, self._made[key])
        assert self._shared is not None
        shared, native = self._shared, frozenset[int]()
        if control_s is None:
            native = self._native_groups(number, group)
        else:
            shared = dataclasses.replace(
                shared, accelerator=None, emulated=False, timeout_s=control_s
            )
        links, programs = self._measured.of(self._topology.places[r].chip for r in group.ranks)
        chooser = Chooser(
            comm_links(group, self._topology, links),
            Tuned(programs),
            connections=self._settings.connections,
        )
        return Communicator(shared, self.group, number, group, chooser, native, name)

    def _native_groups(self, number: int, group: Any) -> frozenset[int]:
        """Make the torch sub-groups of the islands that have a backend; return their ranks."""
        members: set[int] = set()
        for island in group.islands:
            ranks = tuple(sorted(island.ranks))
            backend = self._topology.native_backend(ranks) if len(ranks) > 1 else ""
            if not backend:
                continue
            if not dist.is_initialized():
                if not isinstance(self._store, TorchStore):
                    raise InputError(
                        f"{backend} meets through torch.distributed: call init_process_group first"
                    )
                prefixed = PrefixStore("tutti/native", self._store)
                dist.init_process_group(
                    "gloo", store=prefixed, rank=self._rank, world_size=self._topology.size
                )
            members.update(ranks)
            if self._rank in ranks:
                made = make_group(ranks, self._rank, backend, f"tutti-{number:x}-{ranks[0]}")
                assert self._shared is not None
                self._shared.executor.native.add_group(number, ranks, made)
        return frozenset(members)


def group_number(ranks: tuple[int, ...], name: str, count: int) -> int:
    """Return the number of the `count`-th group of these ranks by this name, alike on all of them.

    63 bits: of a million groups on one rank, two share a number with a chance of 1 in 10 million.
    """
    text = f"{','.join(map(str, ranks))}/{name}/{count}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def _staged(accelerator: Accelerator | None) -> bool:
    """Tell whether tensors of this accelerator are copied to the host, though they lie there."""
    return bool(getattr(accelerator, "copies_through_host", False))


def _close(executor: Executor | None, mover: DeviceMover | None) -> None:
    if executor is not None:
        executor.close()
    if mover is not None:
        mover.close()
