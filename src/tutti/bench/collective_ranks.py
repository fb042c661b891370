"""`tutti bench comm`: rank processes in a test bed on this machine, or those torchrun started."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore

from tutti.accelerator import Accelerator, open_accelerator
from tutti.accelerator.find import count
from tutti.bench import collectives
from tutti.bench.collectives import CollectiveRow, Options
from tutti.bench.emulated_network import BedSpec, bed_ranks
from tutti.collective import Operation
from tutti.comm.communicator import Communicator
from tutti.comm.connect import connect
from tutti.comm.edge_rates import measured_links, nominal_links
from tutti.comm.entry.find_store import open_store
from tutti.comm.entry.store import PrefixedStore
from tutti.comm.places import Place
from tutti.errors import InputError
from tutti.hardware.profile import CollectiveTime, LinkFigure, Profile
from tutti.launch.secret import Secret, all_here, find_secret, new_secret

_MEETING_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Rows, what a Profile takes from them, and what each wire carried."""

    rows: tuple[CollectiveRow, ...]
    links: tuple[LinkFigure, ...]
    collectives: tuple[CollectiveTime, ...]
    regrets: dict[str, tuple[float, ...]]
    wires: dict[str, int]


def bench_on_bed(
    spec: BedSpec, options: Options, *, profile: Profile | None = None, judge: bool = False
) -> Outcome:
    """Measure in a test bed; `judge` measures twice to see what the automatic choice loses."""
    with bed_ranks(spec) as (bed, ranks), tempfile.TemporaryDirectory() as folder:
        before, secret = bed.sent_bytes(), Secret(new_secret().encode())
        answers = ranks.run(
            _bed_rank,
            range(spec.world),
            spec,
            folder,
            options,
            profile,
            judge,
            secret,
            timeout_s=3600,
        )
        after = bed.sent_bytes()
    outcome: Outcome = answers[0]
    return replace(outcome, wires={name: after[name] - before[name] for name in after})


def _bed_rank(
    rank: int,
    spec: BedSpec,
    folder: str,
    options: Options,
    profile: Profile | None,
    judge: bool,
    secret: Secret,
) -> Outcome:
    os.environ["GLOO_SOCKET_IFNAME"] = f"nic{spec.rail(rank)}"
    store = FileStore(f"{folder}/gloo", spec.world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=spec.world)
    joining = Joining(
        rank=rank,
        world=spec.world,
        store=lambda name: FileStore(f"{folder}/{name}", spec.world),
        place=spec.place(rank),
        secret=secret,
    )
    try:
        return _outcome(joining, options, profile, judge)
    finally:
        dist.destroy_process_group()


def bench_under_torchrun(
    options: Options, *, profile: Profile | None = None, judge: bool = False
) -> Outcome:
    """Measure as one rank of a job that torchrun started; every rank returns the same."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local = int(os.environ.get("LOCAL_RANK", "0"))
    accelerator = _local_accelerator(options.device, local)
    place = Place()
    if accelerator is not None:
        place = Place(native=accelerator.collective_backend, device=str(accelerator.device))
        options = replace(options, device=str(accelerator.device))
    secret = find_secret(os.environ)
    if all_here(os.environ):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo")
    board: Any = dist.distributed_c10d._get_default_store()
    store = open_store(secret, _MEETING_S, board=PrefixStore("tutti-bench", board))
    joining = Joining(
        rank=rank,
        world=world,
        store=lambda name: PrefixedStore(name, store),
        place=place,
        secret=secret,
        accelerator=accelerator,
    )
    try:
        return _outcome(joining, options, profile, judge)
    finally:
        dist.destroy_process_group()


def _local_accelerator(device: str, local: int) -> Accelerator | None:
    """Open the device of a rank; ranks beyond the number of devices share them."""
    if device == "cpu":
        return None
    number = count(device)
    if not number:
        raise InputError(f"--device: this machine has no '{device}'; use --device cpu")
    return open_accelerator(f"{device}:{local % number}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    """How a rank joins the others, under one name or several."""

    rank: int
    world: int
    store: Callable[[str], Any]
    place: Place
    secret: Secret
    accelerator: Accelerator | None = None

    def connect(self, name: str, profile: Profile | None) -> Communicator:
        """Return a communicator of all ranks."""
        return connect(
            self.store(name),
            self.rank,
            self.world,
            place=self.place,
            accelerator=self.accelerator,
            profile=profile,
            timeout_s=120.0,
            start_timeout_s=_MEETING_S,
            secret=self.secret,
        )


def _outcome(joining: Joining, options: Options, profile: Profile | None, judge: bool) -> Outcome:
    comm = joining.connect("ours", profile)
    try:
        outcome = measured(comm, options)
        if judge:
            regrets = _judge(comm, joining, options, outcome)
            outcome = replace(outcome, regrets=regrets)
    finally:
        comm.close()
    return outcome


def measured(comm: Communicator, options: Options) -> Outcome:
    """Profile links, then measure; the same on all ranks."""
    links = collectives.profile_links(comm, device=options.device)
    nominal = nominal_links(comm.chooser.links)
    comm.chooser.use(measured_links(comm.chooser.links, links))
    rows = collectives.measure(comm, options, nominal)
    return Outcome(
        rows=tuple(rows),
        links=links,
        collectives=collectives.table(comm, rows),
        regrets={},
        wires={},
    )


def _judge(
    comm: Communicator, joining: Joining, options: Options, tuning: Outcome
) -> dict[str, tuple[float, ...]]:
    """Measure everything again; return what each kind of choice loses against the best.

    "table": chosen from the times of the first run; "links": from profiled links alone.
    """
    fresh = collectives.measure(comm, options, comm.chooser.links)
    best: dict[tuple[str, int], float] = {}
    for row in fresh:
        if row.algorithm != "gloo":
            key = (row.operation, row.bytes)
            best[key] = min(row.seconds, best.get(key, row.seconds))
    regrets: dict[str, tuple[float, ...]] = {}
    for name, timed in (("table", tuning.collectives), ("links", ())):
        profile = Profile(
            chip="CPU",
            origin="bench",
            launch_floor_s=0.0,
            date="2026-01-01",
            links=tuning.links,
            collectives=timed,
        )
        other = joining.connect(f"judged by {name}", profile)
        try:
            regrets[name] = tuple(
                _chosen_seconds(other, operation, size, fresh) / seconds - 1.0
                for (operation, size), seconds in best.items()
            )
        finally:
            other.close()
    return regrets


def _chosen_seconds(
    comm: Communicator, operation: str, num_bytes: int, rows: list[CollectiveRow]
) -> float:
    """Return what the automatic choice took when it was measured, or the nearest chunks of it."""
    whole = collectives.section_bytes(operation, num_bytes, comm.size)
    named = comm.chooser.choose(Operation(operation), whole)
    same = [
        row
        for row in rows
        if (row.operation, row.bytes, row.algorithm) == (operation, num_bytes, named.algorithm)
    ]
    if not same:  # priced so badly that it was not measured: count the worst that was
        here = [row for row in rows if (row.operation, row.bytes) == (operation, num_bytes)]
        return max(row.seconds for row in here)
    return min(same, key=lambda row: abs(row.chunks - named.chunks)).seconds
