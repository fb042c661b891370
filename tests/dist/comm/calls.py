"""What rank processes do in the tests of `comm`: connect once per topology, then run calls."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist

from tests.support.rank_pool import SECRET
from tutti.collective import Operation
from tutti.comm import Communicator, Place, Settings, connect
from tutti.comm.choice import Named

# Small pieces, so that small tensors already come in many.
SETTINGS = Settings(
    fragment_bytes=2048,
    ring_bytes=8192,
    device_fragment_bytes=2048,
    device_ring_bytes=8192,
    inline_bytes=512,
    connections=2,
    in_flight=2,
)
_open: dict[str, Communicator] = {}


@dataclasses.dataclass(frozen=True)
class Seating:
    """Islands of ranks, with the rail and NIC rate of each rank where they matter."""

    name: str
    islands: tuple[tuple[int, ...], ...]
    rails: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()
    native: str = ""

    @property
    def world(self) -> int:
        return sum(map(len, self.islands))

    def place(self, rank: int) -> Place:
        island = next(i for i, ranks in enumerate(self.islands) if rank in ranks)
        return Place(
            host=f"host{island}",
            rail=self.rails[rank] if self.rails else self.islands[island].index(rank),
            bandwidth=self.rates[rank] if self.rates else 0.0,
            native=self.native,
        )


@dataclasses.dataclass(frozen=True)
class Case:
    seating: Seating
    operation: str
    named: Named
    counts: tuple[int, ...]
    dtype: torch.dtype
    root: int = 0
    strided: bool = False
    seed: int = 0
    device: str = "cpu"


def opened(rank: int, seating: Seating, port: int, **options: Any) -> Communicator:
    if seating.name not in _open:
        store = dist.PrefixStore(seating.name, dist.TCPStore("127.0.0.1", port))
        _open[seating.name] = connect(
            store,
            rank,
            seating.world,
            place=seating.place(rank),
            settings=options.pop("settings", SETTINGS),
            timeout_s=options.pop("timeout_s", 20.0),
            secret=SECRET,
            **options,
        )
    return _open[seating.name]


def closed(rank: int, name: str) -> None:
    found = _open.pop(name, None)
    if found is not None:
        found.close()


def values(case: Case, rank: int, count: int) -> torch.Tensor:
    """Return what a rank brings: whole numbers whose sums every dtype holds exactly, or any."""
    generator = torch.Generator().manual_seed(1000 * case.seed + rank)
    if case.dtype in (torch.float32, torch.float64):
        found = torch.randn(count, generator=generator, dtype=case.dtype)
    else:
        found = torch.randint(0, 13, (count,), generator=generator).to(case.dtype)
    return found.to(case.device)


def _strided(tensor: torch.Tensor, case: Case) -> torch.Tensor:
    if not case.strided:
        return tensor
    wide = tensor.new_zeros(2 * tensor.numel())[::2]
    wide.copy_(tensor)
    return wide


def call(comm: Communicator, case: Case) -> torch.Tensor | None:
    """Run one call on this rank and return its result."""
    rank, counts, root = comm.rank, case.counts, case.root
    me = comm.index
    match Operation(case.operation):
        case Operation.ALL_REDUCE:
            tensor = _strided(values(case, rank, counts[0]), case)
            return comm.all_reduce(tensor).wait()
        case Operation.REDUCE:
            tensor = _strided(values(case, rank, counts[0]), case)
            comm.reduce(tensor, root).wait()
            return tensor if rank == root else None
        case Operation.BROADCAST:
            tensor = values(case, rank, counts[0])
            tensor = _strided(tensor if rank == root else torch.zeros_like(tensor), case)
            return comm.broadcast(tensor, root).wait()
        case Operation.REDUCE_SCATTER:
            given = _strided(values(case, rank, sum(counts)), case)
            before = given.clone()
            found = comm.reduce_scatter(given, counts=counts).wait()
            assert torch.equal(given, before)
            return found
        case Operation.ALL_GATHER:
            tensor = _strided(values(case, rank, counts[me]), case)
            return comm.all_gather(tensor, counts=counts).wait()
        case Operation.GATHER:
            tensor = _strided(values(case, rank, counts[me]), case)
            return comm.gather(tensor, root, counts=counts).wait()
        case Operation.SCATTER:
            whole = _strided(values(case, rank, sum(counts)), case) if rank == root else None
            target = torch.empty(counts[me], dtype=case.dtype, device=case.device)
            return comm.scatter(target, root, whole, counts=counts).wait()
        case Operation.ALL_TO_ALL:
            size = comm.size
            rows = [counts[k * size : (k + 1) * size] for k in range(size)]
            tensor = _strided(values(case, rank, sum(rows[me])), case)
            return comm.all_to_all(tensor, counts=rows).wait()
        case Operation.BARRIER:
            comm.barrier().wait()
            return None
        case _:
            raise AssertionError(case.operation)


def as_bytes(tensor: torch.Tensor) -> bytes:
    packed = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.cpu().reshape(-1))
    return packed.view(torch.uint8).numpy().tobytes()


def twice(rank: int, case: Case, port: int) -> tuple[bytes | None, bytes | None]:
    """Run a call two times and return both results as bytes."""
    comm = opened(rank, case.seating, port)
    comm.chooser.obey(case.operation, case.named)
    found = []
    for _ in range(2):
        result = call(comm, case)
        found.append(None if result is None else as_bytes(result))
    return found[0], found[1]
