"""Clocks of several hosts: here one clock under two names, so that the true offset is none."""

from __future__ import annotations

from tests.support.rank_pool import RankPool
from tests.support.rank_training import joined
from tutti.ranks.clocks import Offset, clock_offsets

KERNELS = ["one", "two", "one", "three"]


def offsets(rank: int, port: int, job: str) -> dict[str, Offset]:
    comm = joined(rank, port, job, len(KERNELS))
    found = clock_offsets(comm.control("clocks"), KERNELS)
    comm.barrier().wait()
    comm.close()
    return found


def test_an_offset_is_wrong_by_no_more_than_it_says(pool: RankPool) -> None:
    found = pool.meet(offsets, len(KERNELS))
    assert set(found[0]) == {"one", "two", "three"}
    assert found[0]["one"] == Offset(0.0, 0.0)
    for name in ("two", "three"):
        assert 0 < found[0][name].error_s < 5
        assert abs(found[0][name].seconds) <= found[0][name].error_s + 1e-4
