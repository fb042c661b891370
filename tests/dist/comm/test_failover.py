"""Connections that are cut under running collectives: the job goes on with the same bits."""

from __future__ import annotations

import ctypes
import dataclasses
import random
import socket
import struct
import time
from typing import Any

import pytest
import torch

from tests.dist.comm.calls import SETTINGS, Seating, opened
from tests.support.rank_pool import RankPool
from tutti.bench.beds.comm_failover import ALLOWED_S, KINDS, run_failovers
from tutti.bench.beds.namespaces import why_not
from tutti.comm import CommError, Settings
from tutti.comm.choice import Named

CALLS = 20


def cut_soon(comm: Any, dice: random.Random) -> None:
    """Reset a connection out of this rank in a moment, what the kernel holds of it being lost."""
    executor = comm._shared.executor

    def cut() -> None:
        lanes = dice.choice(list(executor._mesh._outs.values()))._lanes._lanes
        if lanes:
            nowhere = struct.pack("H14x", socket.AF_UNSPEC)  # connecting there resets
            ctypes.CDLL(None).connect(dice.choice(lanes)._socket.fileno(), nowhere, len(nowhere))

    wait_s = dice.uniform(0.0, 0.01)
    executor._owner.reactor.call(lambda: executor._owner.reactor.after(wait_s, cut))


def reduces_under_cuts(
    rank: int, seating: Seating, port: int, algorithm: str, settings: Settings
) -> tuple[int, int]:
    """Return how many results differed, and how many connections were opened in all."""
    comm = opened(rank, seating, port, settings=settings, timeout_s=20.0)
    comm.chooser.obey("all_reduce", Named(algorithm=algorithm, chunks=2))
    dice = random.Random(rank)
    numbers = torch.randn(20_000, generator=torch.Generator().manual_seed(rank))
    first = numbers.clone()
    comm.all_reduce(first).wait()
    different = 0
    for _ in range(CALLS):
        if dice.random() < 0.4:
            cut_soon(comm, dice)
        again = numbers.clone()
        comm.all_reduce(again).wait()
        different += not torch.equal(first, again)
    comm.barrier().wait()
    links = comm._shared.executor._mesh._outs.values()
    opened_now = sum(link._lanes._numbers for link in links)
    comm.close()
    return different, opened_now - settings.connections * len(links)


@pytest.mark.parametrize("connections", [1, 2])
@pytest.mark.parametrize("algorithm", ["ring", "direct"])
def test_cut_connections_change_no_bit(algorithm: str, connections: int) -> None:
    pool = RankPool(3)
    seating = Seating(f"cut {algorithm} {connections}", ((0,), (1,), (2,)))
    settings = Settings(
        fragment_bytes=4096, connections=connections, resend_bytes=65536, inline_bytes=512
    )
    try:
        found = pool.run(
            reduces_under_cuts, range(3), seating, pool.port, algorithm, settings, timeout_s=50
        )
        assert [different for different, _ in found] == [0, 0, 0]
        assert all(anew > 1 for _, anew in found)
    finally:
        pool.close()


def ends_on_a_cut(rank: int, seating: Seating, port: int) -> object:
    settings = dataclasses.replace(SETTINGS, resend_bytes=0)
    comm = opened(rank, seating, port, settings=settings, timeout_s=10.0)
    comm.barrier().wait()
    if rank == 1:
        cut_soon(comm, random.Random(1))
    started = time.monotonic()
    try:
        while time.monotonic() < started + 8.0:
            comm.all_reduce(torch.ones(1000)).wait()
    except CommError as error:
        return error.peer
    finally:
        comm.close()
    return "nothing"


def test_where_nothing_is_kept_a_cut_ends_the_job() -> None:
    pool = RankPool(2)
    try:
        found = pool.run(ends_on_a_cut, range(2), Seating("ends", ((0,), (1,))), pool.port)
        assert "nothing" not in found
    finally:
        pool.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize("kind", KINDS)
def test_a_job_outlives_links_and_nics(kind: str) -> None:
    runs = list(run_failovers(3, (kind,)))
    assert all(run.passed for run in runs), [(run.where, run.stall_s) for run in runs]
    assert max(run.stall_s for run in runs) <= ALLOWED_S
