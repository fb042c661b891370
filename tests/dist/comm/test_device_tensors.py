"""Tensors of a device, through pinned host memory: the same bits as tensors of the host.

On a machine with CUDA the device is a GPU that all ranks share; elsewhere one emulated on the host,
whose tensors take the same way.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.dist.comm.calls import Case, Seating, as_bytes, call, opened
from tests.dist.comm.staged import StagedAccelerator
from tests.support.rank_pool import RankPool
from tutti.accelerator import Accelerator, open_accelerator
from tutti.collective import Operation, algorithms
from tutti.comm.choice import Named
from tutti.comm.places import Topology

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SEATING = Seating("host tensors", ((0, 1), (2,)))  # shared memory and sockets
ON_DEVICE = dataclasses.replace(SEATING, name="device tensors")
OPERATIONS = [o for o in Operation if o not in (Operation.SEND_RECEIVE, Operation.BARRIER)]


def device() -> Accelerator:
    return open_accelerator("cuda") if DEVICE == "cuda" else StagedAccelerator(1e9)


def cases(operation: Operation) -> list[Case]:
    """Return calls of one operation: every program, two dtypes, ragged, strided."""
    world = SEATING.world
    group = Topology(tuple(SEATING.place(r) for r in range(world))).group(range(world))
    whole = (Operation.ALL_REDUCE, Operation.REDUCE, Operation.BROADCAST)
    number = 1 if operation in whole else world**2 if operation is Operation.ALL_TO_ALL else world
    found = []
    for index, algorithm in enumerate(algorithms(operation, group)):
        for dtype in (torch.float32, torch.bfloat16):
            counts = tuple(3000 + 700 * ((index + k) % 3) for k in range(number))
            named = Named(algorithm=algorithm, chunks=1 + index % 3)
            strided = dtype is torch.float32 and index % 2 == 1
            found.append(
                Case(SEATING, operation.value, named, counts, dtype, root=2, strided=strided)
            )
    return found


def both(rank: int, found: list[Case], port: int) -> list[bool]:
    """Run calls on tensors of the host and of the device; tell which results agree."""
    host = opened(rank, SEATING, port)
    other = opened(rank, ON_DEVICE, port, accelerator=device())
    agree = []
    for case in found:
        results = []
        for comm, where in ((host, "cpu"), (other, DEVICE)):
            comm.chooser.obey(case.operation, case.named)
            result = call(comm, dataclasses.replace(case, device=where))
            results.append(None if result is None else as_bytes(result))
        agree.append(results[0] == results[1])
    return agree


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_device_gives_the_bits_of_the_host(pool: RankPool, operation: Operation) -> None:
    found = cases(operation)
    assert found
    for rank, agree in enumerate(pool.run(both, range(3), found, pool.port)):
        wrong = [case for case, same in zip(found, agree, strict=True) if not same]
        assert not wrong, f"rank {rank}: {wrong[0]}"


def many_at_once(rank: int, port: int) -> None:
    """Collectives, messages and rounding in flight together, of the host and of the device."""
    comm = opened(rank, ON_DEVICE, port, accelerator=device())
    size = comm.size
    for turn in range(5):
        reduced = [torch.full((9000 + k,), float(rank + k), device=DEVICE) for k in range(6)]
        works = [comm.all_reduce(tensor) for tensor in reduced]
        on_host = torch.full((20_000,), float(rank + turn))
        works.append(comm.all_reduce(on_host))
        mine = torch.full((5000,), 10.0 * rank + turn, device=DEVICE)
        note = torch.tensor([rank, turn])
        got, got_note = torch.zeros_like(mine), torch.zeros_like(note)
        after, before = (rank + 1) % size, (rank - 1) % size
        works.append(
            comm.exchange([(mine, after), (note, after)], [(got, before), (got_note, before)])
        )
        for work in works:
            work.wait()
        for k, tensor in enumerate(reduced):
            assert (tensor == sum(range(size)) + size * k).all()
        assert (on_host == sum(range(size)) + size * turn).all()
        assert (got == 10.0 * before + turn).all()
        assert got_note.tolist() == [before, turn]
        rounded = torch.full((3000,), 1.0, device=DEVICE)
        comm.all_reduce(rounded, compress="bf16").wait()
        assert (rounded == size).all()


def test_tensors_of_host_and_device_at_once(pool: RankPool) -> None:
    pool.run(many_at_once, range(3), pool.port)
