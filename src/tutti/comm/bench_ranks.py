"""`tutti bench comm` on this machine: rank processes in a test bed, or just side by side."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore

from tutti.collective import Operation
from tutti.comm import bench
from tutti.comm.bed import BedSpec, bed_ranks
from tutti.comm.bench import Options, Row
from tutti.comm.communicator import Communicator
from tutti.comm.connect import connect
from tutti.comm.wires import measured_links, nominal_links
from tutti.hardware.profile import CollectiveTime, LinkFigure, Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Rows, what a Profile takes from them, and what each wire carried."""

    rows: tuple[Row, ...]
    links: tuple[LinkFigure, ...]
    collectives: tuple[CollectiveTime, ...]
    regrets: dict[str, tuple[float, ...]]
    wires: dict[str, int]
    shape: str = ""


def bench_on_bed(
    spec: BedSpec, options: Options, *, profile: Profile | None = None, judge: bool = False
) -> Outcome:
    """Measure in a test bed; `judge` measures twice to see what the automatic choice loses."""
    with bed_ranks(spec) as (bed, ranks), tempfile.TemporaryDirectory() as folder:
        before = bed.sent_bytes()
        answers = ranks.run(
            _bed_rank, range(spec.world), spec, folder, options, profile, judge, timeout_s=3600
        )
        after = bed.sent_bytes()
    found: Outcome = answers[0]
    return Outcome(
        rows=found.rows,
        links=found.links,
        collectives=found.collectives,
        regrets=found.regrets,
        wires={name: after[name] - before[name] for name in after},
    )


def _bed_rank(
    rank: int, spec: BedSpec, folder: str, options: Options, profile: Profile | None, judge: bool
) -> Outcome:
    os.environ["GLOO_SOCKET_IFNAME"] = f"nic{spec.rail(rank)}"
    store = FileStore(f"{folder}/gloo", spec.world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=spec.world)
    ours: Any = FileStore(f"{folder}/ours", spec.world)
    options_ = {"place": spec.place(rank), "timeout_s": 120.0, "start_timeout_s": 30.0}
    comm = connect(ours, rank, spec.world, profile=profile, **options_)  # type: ignore[arg-type]
    try:
        outcome = measured(comm, options)
        if judge:
            again: Any = FileStore(f"{folder}/judged", spec.world)
            regrets = _judge(comm, again, rank, options, outcome, options_)
            outcome = Outcome(
                rows=outcome.rows,
                links=outcome.links,
                collectives=outcome.collectives,
                regrets=regrets,
                wires={},
            )
    finally:
        comm.close()
        dist.destroy_process_group()
    return outcome


def measured(comm: Communicator, options: Options) -> Outcome:
    """Profile links, then measure; the same on all ranks."""
    links = bench.profile_links(comm)
    nominal = nominal_links(comm.chooser.links)
    comm.chooser.use(measured_links(comm.chooser.links, links))
    rows = bench.measure(comm, options, nominal)
    return Outcome(
        rows=tuple(rows),
        links=links,
        collectives=bench.table(comm, rows),
        regrets={},
        wires={},
    )


def _judge(
    comm: Communicator,
    store: Any,
    rank: int,
    options: Options,
    tuning: Outcome,
    place: dict[str, Any],
) -> dict[str, tuple[float, ...]]:
    """Measure everything again; return what each kind of choice loses against the best.

    "table": chosen from the times of the first run; "links": from profiled links alone.
    """
    fresh = bench.measure(comm, options, comm.chooser.links)
    best: dict[tuple[str, int], float] = {}
    for row in fresh:
        if row.algorithm != "gloo":
            key = (row.operation, row.bytes)
            best[key] = min(row.seconds, best.get(key, row.seconds))
    regrets: dict[str, tuple[float, ...]] = {}
    for name, collectives in (("table", tuning.collectives), ("links", ())):
        profile = Profile(
            chip="CPU",
            origin="bench",
            launch_floor_s=0.0,
            date="2026-01-01",
            links=tuning.links,
            collectives=collectives,
        )
        prefixed = PrefixStore(name, store)
        other = connect(prefixed, rank, comm.size, profile=profile, **place)
        try:
            regrets[name] = tuple(
                _chosen_seconds(other, operation, size, fresh) / seconds - 1.0
                for (operation, size), seconds in best.items()
            )
        finally:
            other.close()
    return regrets


def _chosen_seconds(comm: Communicator, operation: str, num_bytes: int, rows: list[Row]) -> float:
    """Return what the automatic choice took when it was measured, or the nearest chunks of it."""
    whole = bench.section_bytes(operation, num_bytes, comm.size)
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
