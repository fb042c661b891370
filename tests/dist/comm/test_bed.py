"""On emulated wires: which wire was used, and forwarding through the host in a pipeline."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time

import psutil
import pytest
import torch
from torch._C._distributed_c10d import FileStore

from tests.dist.comm.staged import StagedAccelerator
from tests.support.rank_pool import SECRET
from tutti.bench.emulated_network import BEDS, MEGABIT, Bed, BedSpec, bed_ranks, why_not
from tutti.comm import Settings, connect
from tutti.comm.choice import Named

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

RAILS = BedSpec(name="t", nics=((400, 400),) * 2, ranks_per_host=2, spine=100.0)


def reduced(rank: int, spec: BedSpec, folder: str, algorithm: str, num_bytes: int) -> None:
    store = FileStore(f"{folder}/{algorithm}", spec.world)
    comm = connect(store, rank, spec.world, place=spec.place(rank), timeout_s=60.0, secret=SECRET)
    if algorithm != "auto":
        comm.chooser.obey("all_reduce", Named(algorithm=algorithm))
    tensor = torch.full((num_bytes // 4,), float(rank))
    comm.all_reduce(tensor).wait()
    assert (tensor == sum(range(spec.world))).all()
    comm.close()


def test_hierarchical_stays_on_its_rails(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """Half of the data leave by each NIC, and nothing crosses the spine."""
    size = 1 << 20
    with bed_ranks(RAILS) as (bed, ranks):
        before = bed.sent_bytes()
        ranks.run(reduced, range(4), RAILS, str(tmp_path), "hierarchical", size)
        after = bed.sent_bytes()
        sent = {wire: after[wire] - before[wire] for wire in after}
    for wire in ("0/0", "0/1", "1/0", "1/1"):
        assert size / 2 <= sent[wire] < size / 2 * 1.1 + 50_000, sent
    assert sent["spine/0"] + sent["spine/1"] < 50_000, sent


def test_a_scattered_ring_crosses_each_wire_once(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """Ranks handed out in turn: the ring still leaves each host once, 2·(n−1)/n of the data."""
    spec = BedSpec(name="s", nics=((400,),) * 2, ranks_per_host=2, scattered=True)
    size = 1 << 20
    with bed_ranks(spec) as (bed, ranks):
        before = bed.sent_bytes()
        ranks.run(reduced, range(4), spec, str(tmp_path), "ring", size)
        after = bed.sent_bytes()
    for wire in ("0/0", "1/0"):
        sent = after[wire] - before[wire]
        assert 1.5 * size <= sent < 1.5 * size * 1.1 + 50_000


def test_nothing_is_left_of_a_bed_whose_owner_is_killed() -> None:
    program = (
        "from tutti.bench.emulated_network import BEDS, Bed\n"
        "import time\n"
        "bed = Bed(BEDS['pair'])\n"
        "print(*bed.holders, flush=True)\n"
        "time.sleep(60)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    holders = [int(word) for word in owner.stdout.readline().split()]
    assert len(holders) == 3
    assert all(psutil.pid_exists(pid) for pid in holders)
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    for _ in range(50):
        if not any(psutil.pid_exists(pid) for pid in holders):
            return
        time.sleep(0.1)
    raise AssertionError("processes of the bed are left over")


def test_a_bed_is_removed() -> None:
    bed = Bed(BEDS["pair"])
    holders = list(bed.holders)
    bed.close()
    assert not any(psutil.pid_exists(pid) for pid in holders)


def forwarded(rank: int, spec: BedSpec, folder: str, num_bytes: int) -> dict[str, float]:
    """Send device tensors in pieces, and as a whole; return the median times."""
    rate = spec.nics[0][0] * MEGABIT
    found: dict[str, float] = {}
    settings = {
        "pieces": Settings(device_fragment_bytes=num_bytes // 16, in_flight=4),
        "whole": Settings(device_fragment_bytes=4 * num_bytes, in_flight=4),
    }
    comms = {
        name: connect(
            FileStore(f"{folder}/{name}", spec.world),
            rank,
            spec.world,
            place=spec.place(rank),
            accelerator=StagedAccelerator(rate),
            settings=one,
            timeout_s=60.0,
            secret=SECRET,
        )
        for name, one in settings.items()
    }
    tensor = torch.full((num_bytes // 4,), float(rank))
    samples: dict[str, list[float]] = {name: [] for name in comms}
    for _ in range(5):
        for name, comm in comms.items():
            comm.barrier().wait()
            started = time.perf_counter()
            if rank == 0:
                comm.send(tensor, 1).wait()
            else:
                tensor.fill_(9.0)
                comm.receive(tensor, 0).wait()
                assert not tensor.any()
            comm.barrier().wait()
            samples[name].append(time.perf_counter() - started)
    for name, comm in comms.items():
        found[name] = statistics.median(samples[name])
        comm.close()
    return found


def test_forwarding_through_the_host_is_a_pipeline(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """Device to host, network, host to device: three equal stages, in pieces or one by one."""
    spec = BEDS["pair"]
    with bed_ranks(spec) as (_, ranks):
        times = ranks.run(forwarded, range(2), spec, str(tmp_path), 4 << 20)[1]
    print(f"whole {times['whole']:.3f} s, pieces {times['pieces']:.3f} s")
    assert times["pieces"] < times["whole"]


def carried(rank: int, spec: BedSpec, folder: str, num_bytes: int) -> dict[int, float]:
    """Return the bytes per second that each wire of a rank is seen to carry."""
    store = FileStore(f"{folder}/carried", spec.world)
    comm = connect(store, rank, spec.world, place=spec.place(rank), timeout_s=60.0, secret=SECRET)
    comm.chooser.obey("all_reduce", Named(algorithm="ring"))
    comm.barrier().wait()
    before = comm.carried()
    comm.all_reduce(torch.ones(num_bytes // 4)).wait()
    comm.barrier().wait()
    after = comm.carried()
    rates = {
        peer: (now.bytes - before[peer].bytes) / (now.busy_s - before[peer].busy_s)
        for peer, now in after.items()
        if peer in before and now.bytes - before[peer].bytes > num_bytes // 8
    }
    comm.close()
    return rates


def test_what_a_wire_carries_is_seen_by_whoever_sends(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """Of hosts with NICs of 100 and 400 Mbit/s the slow one is seen on its own ways only."""
    spec = BedSpec(name="c", nics=((400,), (100,), (400,), (400,)))
    with bed_ranks(spec) as (_, ranks):
        told = ranks.run(carried, range(4), spec, str(tmp_path), 4 << 20)
    rates = {(home, away): rate for home, own in enumerate(told) for away, rate in own.items()}
    slow = {edge for edge in rates if 1 in edge}
    assert len(rates) >= 4
    assert max(rates[e] for e in slow) < min(rate for e, rate in rates.items() if e not in slow)
