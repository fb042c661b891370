"""What holds beyond single calls: overlap, messages, sub-groups, rounding, native backends."""

from __future__ import annotations

import os
import random

import pytest
import torch
import torch.distributed as dist

from tests.dist.comm.calls import Seating, closed, opened
from tests.support.rank_pool import RankPool
from tutti.comm import CommError, Communicator
from tutti.comm.choice import Named
from tutti.ranks.standing_processes import RankError

SQUARE = Seating("plain-square", ((0, 1), (2, 3)))
UNEVEN = Seating("uneven", ((0, 3, 1), (4, 2)), rails=(0, 1, 0, 2, 1))


# --- several at once -----------------------------------------------------------------------


def in_flight(rank: int, seating: Seating, port: int) -> None:
    comm = opened(rank, seating, port)
    size = comm.size
    reduced = [torch.full((300 + 40 * k,), float(rank + k)) for k in range(12)]
    works = [comm.all_reduce(tensor) for tensor in reduced]
    gathered = comm.all_gather(torch.full((rank,), rank), counts=range(size))
    for k in reversed(range(12)):
        works[k].wait()
        assert (reduced[k] == sum(range(size)) + size * k).all()
    expected = [r for r in range(size) for _ in range(r)]
    assert gathered.wait().tolist() == expected
    assert all(work.done() for work in works)


def test_many_operations_are_in_flight(pool: RankPool) -> None:
    pool.run(in_flight, range(5), UNEVEN, pool.port)


def crossing(rank: int, seating: Seating, port: int) -> None:
    """Every pair exchanges several messages, posted in another order on each rank."""
    comm = opened(rank, seating, port)
    others = [peer for peer in range(comm.size) if peer != rank]
    turned = others[rank % len(others) :] + others[: rank % len(others)]
    sent = {
        (peer, k): torch.full((50 * k,), 100.0 * rank + peer + k) for peer in others for k in (1, 2)
    }
    got = {(peer, k): torch.empty(50 * k) for peer in others for k in (1, 2)}
    first = comm.exchange(sends=[(sent[peer, 1], peer) for peer in turned])
    work = comm.exchange(
        sends=[(sent[peer, 2], peer) for peer in others],
        receives=[(got[peer, k], peer) for k in (1, 2) for peer in reversed(turned)],
    )
    work.wait()
    first.wait()
    for (peer, k), tensor in got.items():
        assert (tensor == 100.0 * peer + rank + k).all()


def test_messages_meet_in_order_whatever_the_order_of_peers(pool: RankPool) -> None:
    for _ in range(3):
        pool.run(crossing, range(5), UNEVEN, pool.port)


def strided_message(rank: int, seating: Seating, port: int) -> None:
    comm = opened(rank, seating, port)
    grid = torch.arange(40.0).view(5, 8)
    if rank == 0:
        comm.exchange(sends=[(grid[:, 3], 1), (grid[0, :0], 1), (grid[2:4], 1)]).wait()
    else:
        target = torch.zeros(5, 8)
        rows = torch.zeros(2, 8)
        receives = [(target[:, 1], 0), (target[0, :0], 0), (rows, 0)]
        comm.exchange(receives=receives).wait()
        assert torch.equal(target[:, 1], grid[:, 3])
        assert target[:, 2:].sum() == 0
        assert torch.equal(rows, grid[2:4])


def test_messages_of_columns_and_of_nothing(pool: RankPool) -> None:
    pool.run(strided_message, range(2), Seating("two", ((0,), (1,))), pool.port)


def own_message(rank: int, seating: Seating, port: int) -> None:
    comm = opened(rank, seating, port)
    target = torch.zeros(7)
    comm.exchange(sends=[(torch.ones(7), rank)], receives=[(target, rank)]).wait()
    assert target.sum() == 7


def test_a_message_to_oneself(pool: RankPool) -> None:
    pool.run(own_message, range(2), Seating("two", ((0,), (1,))), pool.port)


def channels_cross(rank: int, seating: Seating, port: int) -> list[list[float]]:
    """Rank 0 sends down, up, down; rank 1 takes up first: in one order they would be swapped."""
    comm = opened(rank, seating, port)
    mine = [torch.full((5000,), float(k)) for k in range(4)]
    got = [torch.zeros(5000) for _ in range(4)]
    peer = 1 - rank
    sent = ("down", "up", "down", "") if rank == 0 else ("", "down", "up", "down")
    taken = ("up", "", "down", "down") if rank == 0 else ("up", "down", "down", "")
    works = [comm.send(t, peer, channel=name) for t, name in zip(mine, sent, strict=True)]
    works += [comm.receive(t, peer, channel=name) for t, name in zip(got, taken, strict=True)]
    for work in works:
        work.wait()
    return [t.unique().tolist() for t in got]


@pytest.mark.parametrize("islands", [((0,), (1,)), ((0, 1),)])
def test_channels_are_matched_each_for_itself(
    pool: RankPool, islands: tuple[tuple[int, ...], ...]
) -> None:
    seating = Seating(f"channels {islands}", islands)
    for _ in range(2):  # counts of the first time must not shift the second
        first, second = pool.run(channels_cross, range(2), seating, pool.port)
        assert first == [[2.0], [0.0], [1.0], [3.0]]
        assert second == [[1.0], [0.0], [2.0], [3.0]]


def channels_wait(rank: int, seating: Seating, port: int) -> float:
    """Rank 0 asks for `late` first, but rank 1 sends it only after an answer to `now`."""
    comm = opened(rank, seating, port)
    late, now, go = (torch.full((3000,), 10.0 * rank + k) for k in range(3))
    if rank == 0:
        late_work = comm.receive(late, 1, channel="late")
        comm.receive(now, 1, channel="now").wait(10.0)
        comm.send(go, 1, channel="go").wait()
        late_work.wait(10.0)
        assert (now == 11.0).all()
        return late.mean().item()
    comm.send(now, 0, channel="now").wait()
    comm.receive(go, 0, channel="go").wait(10.0)
    comm.send(late, 0, channel="late").wait()
    return go.mean().item()


@pytest.mark.parametrize("islands", [((0,), (1,)), ((0, 1),)])
def test_a_channel_does_not_wait_for_another(
    pool: RankPool, islands: tuple[tuple[int, ...], ...]
) -> None:
    seating = Seating(f"channels {islands}", islands)
    found = pool.run(channels_wait, range(2), seating, pool.port)
    assert found == [10.0, 2.0]


def unasked(rank: int, seating: Seating, port: int) -> list[float]:
    """Rank 0 sends messages of all sizes; rank 1 asks for the last first, when all have come."""
    comm = opened(rank, seating, port)
    sizes = [3000, 200, 1, 600, 9000, 500, 40]
    tensors = [torch.full((size,), float(10 * k + 1)) for k, size in enumerate(sizes)]
    if rank == 0:
        works = [comm.send(t, 1, channel=f"{k}") for k, t in enumerate(tensors)]
        works.append(comm.receive(torch.empty(1), 1, channel="end"))
    else:
        for tensor in tensors:
            tensor.zero_()
        order = list(reversed(range(len(sizes))))
        works = [comm.receive(tensors[order[0]], 0, channel=f"{order[0]}")]
        works[0].wait()
        works += [comm.receive(tensors[k], 0, channel=f"{k}") for k in order[1:]]
        works.append(comm.send(torch.ones(1), 0, channel="end"))
    for work in works:
        work.wait()
    assert all(t.unique().numel() == 1 for t in tensors)
    return [t[0].item() for t in tensors]


@pytest.mark.parametrize("islands", [((0,), (1,)), ((0, 1),)])
def test_what_nobody_asked_for_yet_blocks_nothing(
    pool: RankPool, islands: tuple[tuple[int, ...], ...]
) -> None:
    """More than a ring of shared memory holds lies before the message that is asked for."""
    seating = Seating(f"channels {islands}", islands)
    for _ in range(3):
        _, found = pool.run(unasked, range(2), seating, pool.port)
        assert found == [10.0 * k + 1 for k in range(7)]


# --- groups --------------------------------------------------------------------------------


def grouped(rank: int, seating: Seating, port: int) -> None:
    comm = opened(rank, seating, port)
    low, odd = comm.subgroup([0, 1, 2]), comm.subgroup([1, 3])
    assert (low is None) == (rank > 2)
    assert (odd is None) == (rank % 2 == 0)
    works = []
    if low is not None:
        mine = torch.full((900,), float(rank))
        works.append((mine, low.all_reduce(mine), 3.0))
    if odd is not None:
        other = torch.full((700,), float(rank))
        works.append((other, odd.all_reduce(other), 4.0))
        assert odd.broadcast(torch.tensor([rank]), 3).wait().item() == 3
    for tensor, work, due in works:
        work.wait()
        assert (tensor == due).all()
    said = [{"rank": r, "words": ["x"] * r} for r in range(comm.size)]
    assert comm.gather_values(said[rank]) == said
    assert comm.gather_values(said[rank], root=2) == (said if rank == 2 else None)
    assert comm.broadcast_value(said[rank] if rank == 3 else None, 3) == said[3]
    control = comm.control("control", 20.0)
    assert control.gather_values(rank) == list(range(comm.size))


def test_groups_overlap(pool: RankPool) -> None:
    pool.run(grouped, range(4), SQUARE, pool.port)


def other_groups(rank: int, seating: Seating, port: int) -> tuple[int | None, str]:
    comm = opened(rank, seating, port, timeout_s=1.0)
    group = comm.subgroup([0, 1] if rank else [0, 1, 2]) or comm
    with pytest.raises(CommError) as caught:
        group.barrier().wait()
    closed(rank, seating.name)
    return caught.value.peer, str(caught.value)


def test_groups_that_differ_are_named_when_they_are_used(pool: RankPool) -> None:
    found = pool.run(other_groups, range(3), Seating("differ", ((0, 1, 2),)), pool.port)
    blamed = {peer for peer, _ in found}
    assert blamed in ({0}, {1}), found  # which of the two is wrong, nobody can tell


def crossed(rank: int, seating: Seating, port: int, turns: int) -> list[float]:
    """Start collectives of several groups in a different order on every rank, then wait."""
    comm = opened(rank, seating, port)
    sets = [(0, 1, 2), (0, 1), (1, 2), (0, 2)]
    keys = [(ranks, use) for ranks in sets if rank in ranks for use in ("a", "b")]
    random.Random(rank).shuffle(keys)  # only members make a group, when they like
    groups = {(ranks, use): comm.subgroup(ranks, use) for ranks, use in keys}
    found = []
    for turn in range(turns):
        random.Random(1000 * rank + turn).shuffle(keys)
        works = {}
        for ranks, use in keys:
            tensor = torch.full((5000,), float(10**rank) if use == "a" else 1.0)
            works[ranks, use] = groups[ranks, use].all_reduce(tensor)
        random.Random(77 * rank + turn).shuffle(keys)
        for ranks, use in keys:
            due = sum(10.0**r for r in ranks) if use == "a" else float(len(ranks))
            assert (works[ranks, use].wait() == due).all()
            found.append(due)
    return found


def test_groups_are_used_in_any_order(pool: RankPool) -> None:
    seating = Seating("crossed", ((0, 1), (2,)))
    assert all(pool.run(crossed, range(3), seating, pool.port, 20))


def other_overrides(rank: int, seating: Seating, port: int) -> None:
    os.environ["TUTTI_COMM"] = "all_reduce=ring" if rank else ""
    try:
        opened(rank, seating, port)
    finally:
        del os.environ["TUTTI_COMM"]


def test_ranks_started_differently_are_refused(pool: RankPool) -> None:
    with pytest.raises(RankError, match="another 'overrides'"):
        pool.run(other_overrides, range(2), Seating("overrides", ((0, 1),)), pool.port)


# --- numbers -------------------------------------------------------------------------------


# --- native backends -----------------------------------------------------------------------


def native(rank: int, port: int, backend: str) -> int:
    from torch._C._distributed_c10d import ProcessGroupGloo

    made = []

    def create(store, rank, size, timeout):  # type: ignore[no-untyped-def]
        made.append(size)
        return ProcessGroupGloo(store, rank, size, timeout)

    if backend == "fakeccl":
        dist.Backend.register_backend(backend, create, devices=["cpu"])
    seating = Seating("native", ((0, 3, 1), (4, 2)), rails=(0, 1, 0, 2, 1), native=backend)
    comm = opened(rank, seating, port)
    try:
        _every_native_step(comm)
        _native_sub_groups(comm)
    finally:
        closed(rank, "native")
        dist.destroy_process_group()
    return len(made)


def _every_native_step(comm: Communicator) -> None:
    size, rank = comm.size, comm.rank
    counts = [3 * r + 1 for r in range(size)]
    for algorithm in ("hierarchical", "leader"):
        for operation in ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce"):
            comm.chooser.obey(operation, Named(algorithm=algorithm, chunks=2))
        found = comm.all_reduce(torch.arange(500.0) * (rank + 1)).wait()
        assert torch.equal(found, torch.arange(500.0) * 15)
        part = comm.reduce_scatter(torch.arange(35.0), counts=counts).wait()
        start = sum(counts[:rank])
        assert torch.equal(part, torch.arange(35.0)[start : start + counts[rank]] * size)
        whole = comm.all_gather(torch.full((counts[rank],), rank), counts=counts).wait()
        assert whole.tolist() == [r for r in range(size) for _ in range(counts[r])]
        for root in (0, 4):
            assert comm.broadcast(torch.full((77,), rank), root).wait().eq(root).all()
            summed = torch.full((77,), rank)
            comm.reduce(summed, root).wait()
            assert rank != root or summed.eq(10).all()
            comm.chooser.obey("gather", Named(algorithm="leader"))
            comm.chooser.obey("scatter", Named(algorithm="leader"))
            got = comm.gather(torch.full((counts[rank],), rank), root, counts=counts).wait()
            assert rank != root or torch.equal(got, whole)
            mine = torch.empty(counts[rank], dtype=torch.int64)
            comm.scatter(mine, root, whole if rank == root else None, counts=counts).wait()
            assert mine.eq(rank).all()
    comm.chooser.obey("all_to_all", Named(algorithm="rail"))
    given = torch.tensor([10 * rank + t for t in range(size) for _ in range(2)])
    found = comm.all_to_all(given).wait()
    assert found.tolist() == [10 * s + rank for s in range(size) for _ in range(2)]
    comm.barrier().wait()


def _native_sub_groups(comm: Communicator) -> None:
    """Members alone make groups that share pairs of ranks of an island, also twice."""
    works = []
    for ranks in ([0, 1], [0, 1, 4], [0, 1], [1, 3], [2, 4]):
        if comm.rank not in ranks:
            continue
        group = comm.subgroup(ranks)
        assert group is not None
        group.chooser.obey("all_reduce", Named(algorithm="native" if len(ranks) == 2 else "leader"))
        works.append((group.all_reduce(torch.full((60,), 2.0**comm.rank)), ranks))
    for work, ranks in works:
        assert work.wait().eq(sum(2.0**rank for rank in ranks)).all()


@pytest.mark.parametrize("backend", ["gloo", "fakeccl"])
def test_islands_with_a_library_of_their_own(backend: str) -> None:
    pool = RankPool(5)
    try:
        made = pool.run(native, range(5), pool.port, backend)
    finally:
        pool.close()
    if backend == "fakeccl":
        assert all(made), "the third-party backend was not used"
