"""The pool of rank processes that other tests stand on: it names who failed, and recovers."""

from __future__ import annotations

import os
import time

import pytest
import torch

from tests.support.rank_pool import RankPool
from tutti.ranks.standing_processes import RankError


def threads_and_process(rank: int) -> tuple[int, int, int]:
    return rank, torch.get_num_threads(), os.getpid()


def fails(rank: int, which: int) -> int:
    if rank == which:
        raise ValueError("as told")
    return rank


def hangs(rank: int, which: int) -> None:
    if rank == which:
        time.sleep(600)


def dies(rank: int, which: int) -> None:
    if rank == which:
        os._exit(3)


def test_ranks_stay_and_have_one_thread_each(pool: RankPool) -> None:
    first = pool.run(threads_and_process, range(3))
    assert [(rank, threads) for rank, threads, _ in first] == [(0, 1), (1, 1), (2, 1)]
    assert pool.run(threads_and_process, range(3)) == first
    assert len({process for _, _, process in first} | {os.getpid()}) == 4


def test_an_error_comes_with_rank_and_traceback(pool: RankPool) -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1: ValueError\('as told'\).*in fails"):
        pool.run(fails, range(3), 1)
    assert pool.run(fails, range(3), 5) == [0, 1, 2]


@pytest.mark.parametrize(
    ("job", "said"),
    [
        pytest.param(hangs, "rank 1 has not answered after", marks=pytest.mark.slow),
        (dies, "rank 1 ended"),
    ],
)
def test_a_pool_with_a_lost_rank_is_rebuilt(job, said) -> None:
    small = RankPool(2)
    try:
        with pytest.raises(RankError, match=said):
            small.run(job, range(2), 1, timeout_s=8.0)
        assert [rank for rank, _, _ in small.run(threads_and_process, range(2))] == [0, 1]
    finally:
        small.close()
