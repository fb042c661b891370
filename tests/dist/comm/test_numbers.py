"""What happens to numbers on their way: wider sums, bytes that are only moved, rounding."""

from __future__ import annotations

import pytest
import torch

from tests.dist.comm.calls import Seating, as_bytes, opened
from tests.dist.comm.test_semantics import SQUARE, UNEVEN
from tests.support.rank_pool import RankPool
from tutti.comm.choice import Named


def wide_sum(rank: int, seating: Seating, port: int) -> tuple[bytes, float]:
    comm = opened(rank, seating, port)
    comm.chooser.obey("all_reduce", Named(algorithm="ring"))
    tensor = torch.full((999,), 1.0 + rank / 128, dtype=torch.bfloat16)
    comm.all_reduce(tensor, accumulate=torch.float32).wait()
    comm.chooser.obey("all_reduce", None)
    return as_bytes(tensor), tensor[0].item()


def test_sums_can_be_wider_than_the_numbers(pool: RankPool) -> None:
    answers = pool.run(wide_sum, range(5), UNEVEN, pool.port)
    exact = torch.tensor(sum(1.0 + rank / 128 for rank in range(5))).bfloat16().item()
    assert {found for _, found in answers} == {exact}
    assert len({bits for bits, _ in answers}) == 1


def moved_bytes(rank: int, seating: Seating, port: int) -> None:
    comm = opened(rank, seating, port)
    mine = torch.arange(rank, rank + 33).to(torch.float8_e4m3fn)
    found = comm.all_gather(mine).wait()
    for peer in range(comm.size):
        due = torch.arange(peer, peer + 33).to(torch.float8_e4m3fn)
        assert as_bytes(found[33 * peer : 33 * peer + 33]) == as_bytes(due)
    with pytest.raises(Exception, match="only moved, not added"):
        comm.all_reduce(mine)


def test_fp8_is_moved_but_not_added(pool: RankPool) -> None:
    pool.run(moved_bytes, range(4), SQUARE, pool.port)


def extreme(rank: int, seating: Seating, port: int) -> None:
    comm = opened(rank, seating, port)
    assert comm.all_reduce(torch.tensor([rank, -rank]), "max").wait().tolist() == [3, 0]
    assert comm.all_reduce(torch.tensor([rank, -rank]), "min").wait().tolist() == [0, -3]


def test_largest_and_smallest(pool: RankPool) -> None:
    pool.run(extreme, range(4), SQUARE, pool.port)


def some_counts(rank: int, seating: Seating, port: int) -> None:
    comm = opened(rank, seating, port)
    size = comm.size
    sends, receives = [(rank + t) % 3 for t in range(size)], [(s + rank) % 3 for s in range(size)]
    given = torch.tensor([10 * rank + t for t in range(size) for _ in range(sends[t])])
    found = comm.all_to_all(given, send_counts=sends, receive_counts=receives).wait()
    assert found.tolist() == [10 * s + rank for s in range(size) for _ in range(receives[s])]


def test_all_to_all_with_own_counts_only(pool: RankPool) -> None:
    pool.run(some_counts, range(5), UNEVEN, pool.port)


def rounded(rank: int, seating: Seating, port: int, how: str) -> tuple[list[bytes], float, float]:
    comm = opened(rank, seating, port)
    torch.manual_seed(rank)
    base = torch.randn(3000)
    total = torch.zeros(3000, dtype=torch.float64)
    bits, first = [], 0.0
    inputs = [torch.randn(3000, generator=torch.Generator().manual_seed(r)) for r in range(4)]
    torch.manual_seed(0)
    exact = sum(t.double() for t in inputs)
    for step in range(20):
        tensor = inputs[rank].clone()
        comm.all_reduce(tensor, compress=how).wait()
        bits.append(as_bytes(tensor))
        total += tensor
        if not step:
            first = (tensor - exact).abs().max().item()
    del base
    mean = (total / 20 - exact).abs().max().item()
    return bits, first, mean


@pytest.mark.parametrize(("how", "largest"), [("bf16", 0.05), ("fp8", 0.7)])
def test_rounding_between_islands(pool: RankPool, how: str, largest: float) -> None:
    answers = pool.run(rounded, range(4), SQUARE, pool.port, how)
    assert all(bits == answers[0][0] for bits, _, _ in answers), "not the same on all ranks"
    _, first, mean = answers[0]
    assert 0 < first < largest
    assert mean < first, "errors are fed back, so they do not pile up"
