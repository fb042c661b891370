"""Measures collectives: what `tutti bench comm` runs, on every rank alike.

Candidates take turns, so that what disturbs the machine disturbs all of them; a sample is the time
of the slowest rank, a figure the median of samples. Plain gloo runs beside ours on the same wires.
Links are profiled by messages between pairs, all ranks of a kind of edge at the same time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tutti.collective import Edge, Operation, algorithms
from tutti.comm.choice import Named
from tutti.comm.communicator import Communicator
from tutti.comm.edge_rates import link_name
from tutti.comm.native import ALL_GATHER, REDUCE_SCATTER
from tutti.cost.network.group_links import GroupLinks
from tutti.cost.network.program_choice import CHUNKS, Efficiency, program_seconds
from tutti.cost.network.program_rates import lower_bound_seconds
from tutti.cost.network.tuned_programs import group_shape
from tutti.errors import InputError, hint
from tutti.hardware.profile import CollectiveTime, LinkFigure

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce")
_SHORT_SWAPS, _LONG_SWAPS = 40, 6
_CLEAR, _LARGEST_SWAP = 8, 64 << 20
_IN_PROGRAM = 0.5  # of a swap: the rest is handing it to the executor and back
_FAR = 2.5  # times the best price beyond which a program is not measured
# Times the fastest, in the first round, beyond which a program is not measured again; where even
# the fastest is short, the first round tells little, for it opens connections.
_HOPELESS, _LONG_S = 1.75, 0.2
_NO_LOSS = Efficiency(island=1.0, fabric=1.0, startup_s=0.0, hop_s=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to measure."""

    operations: tuple[str, ...] = ("all_reduce",)
    sizes: tuple[int, ...] = (1 << 20,)  # bytes of a rank's buffer
    repeats: int = 5
    all_programs: bool = False
    gloo: bool = True
    device: str = "cpu"  # where the tensors lie

    def __post_init__(self) -> None:
        for name in self.operations:
            if name not in OPERATIONS:
                raise InputError(f"--op: '{name}'; {hint(name, OPERATIONS)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRow:
    """One cell of the table."""

    operation: str
    bytes: int
    program: str  # algorithm and chunks, or "gloo"
    algorithm: str
    chunks: int
    chosen: bool
    seconds: float
    predicted_s: float | None
    bound_s: float
    ranks: int

    @property
    def algbw(self) -> float:
        """Bytes of a rank's buffer per second."""
        return self.bytes / self.seconds

    @property
    def busbw(self) -> float:
        """What nccl-tests calls bus bandwidth."""
        share = (self.ranks - 1) / self.ranks
        factor = {"all_reduce": 2 * share, "broadcast": 1.0, "reduce": 1.0}
        return self.algbw * factor.get(self.operation, share)

    @property
    def ratio(self) -> float | None:
        """The time over the bottleneck-link lower bound; None inside one island."""
        return self.seconds / self.bound_s if self.bound_s else None


def section_bytes(operation: str, num_bytes: int, size: int) -> int:
    """Return the bytes of all sections together, by which programs are priced."""
    return num_bytes * size if operation == "all_to_all" else num_bytes


def candidates(comm: Communicator, operation: str, num_bytes: int, every: bool) -> list[Named]:
    """Return the programs to measure, the chosen one first."""
    whole = section_bytes(operation, num_bytes, comm.size)
    chosen = comm.chooser.choose(Operation(operation), whole)
    if not every:
        return [chosen]
    by_program: dict[Named, float] = {}
    for algorithm in algorithms(operation, comm.group):
        for chunks in CHUNKS if len(comm.group.islands) > 1 else (1,):
            named = Named(algorithm=algorithm, chunks=chunks)
            by_program[named] = predicted(comm, operation, num_bytes, named)
    near = min(by_program.values()) * _FAR
    kept = [named for named, seconds in by_program.items() if seconds <= near and named != chosen]
    return [chosen, *kept]


def predicted(comm: Communicator, operation: str, num_bytes: int, named: Named) -> float:
    """Return the price of a program."""
    root = comm.group.ranks[0] if Operation(operation).has_root else None
    program = named.build(Operation(operation), comm.group, root)
    whole = section_bytes(operation, num_bytes, comm.size)
    return program_seconds(program, float(whole), comm.chooser.links, _NO_LOSS)


@dataclass(frozen=True, slots=True)
class _Buffers:
    """The tensors of a cell, made once."""

    tensor: Tensor
    small: Tensor
    large: Tensor
    other: Tensor

    @classmethod
    def of(cls, elements: int, size: int, device: str) -> _Buffers:
        each = -(-elements // size)
        counts = (elements, each, each * size, each * size)
        return cls(*(torch.ones(count, device=device) for count in counts))


def _ours(comm: Communicator, operation: str, buffers: _Buffers) -> Callable[[], object]:
    """Return a call of ours."""
    root, tensor = comm.ranks[0], buffers.tensor
    small, large, other = buffers.small, buffers.large, buffers.other
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: comm.all_reduce(tensor).wait(),
        "broadcast": lambda: comm.broadcast(tensor, root).wait(),
        "reduce": lambda: comm.reduce(tensor, root).wait(),
        "reduce_scatter": lambda: comm.reduce_scatter(large, small, overwrite=True).wait(),
        "all_gather": lambda: comm.all_gather(small, large).wait(),
        "all_to_all": lambda: comm.all_to_all(large, other).wait(),
    }
    return calls[operation]


def _gloo(comm: Communicator, operation: str, buffers: _Buffers) -> Callable[[], object]:
    """Return the same call of gloo's."""
    root, tensor = comm.ranks[0], buffers.tensor
    small, large, other = buffers.small, buffers.large, buffers.other
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(tensor),
        "broadcast": lambda: dist.broadcast(tensor, root),
        "reduce": lambda: dist.reduce(tensor, root),
        "reduce_scatter": lambda: REDUCE_SCATTER(small, large),
        "all_gather": lambda: ALL_GATHER(large, small),
        "all_to_all": lambda: dist.all_to_all_single(other, large),
    }
    return calls[operation]


def measure(comm: Communicator, options: Options, nominal: GroupLinks) -> list[CollectiveRow]:
    """Measure every operation and size; all ranks return the same rows.

    `nominal` links are what the lower bound counts with.
    """
    rows = []
    for operation in options.operations:
        for num_bytes in options.sizes:
            rows += _cell(comm, operation, num_bytes, options, nominal)
    return rows


def _cell(
    comm: Communicator, operation: str, num_bytes: int, options: Options, nominal: GroupLinks
) -> list[CollectiveRow]:
    programs = candidates(comm, operation, num_bytes, options.all_programs)
    buffers = _Buffers.of(num_bytes // 4, comm.size, options.device)
    ours, gloo = _ours(comm, operation, buffers), _gloo(comm, operation, buffers)
    beside = options.gloo and _works(gloo)
    contestants: list[Named | None] = [*programs, *([None] if beside else [])]

    def once(named: Named | None) -> float:
        if named is not None:
            comm.chooser.obey(operation, named)
        return _timed(comm, gloo if named is None else ours, options.device)

    first = _slowest(comm, [[once(named)] for named in contestants])  # warms up
    hopeless = _hopeless(contestants, [times[0] for times in first])
    samples: list[list[float]] = [[] for _ in contestants]
    for _ in range(options.repeats):
        for number, named in enumerate(contestants):
            samples[number].append(first[number][0] if number in hopeless else once(named))
    comm.chooser.obey(operation, None)
    slowest = _slowest(comm, samples)
    whole = float(section_bytes(operation, num_bytes, comm.size))
    bound = lower_bound_seconds(Operation(operation), whole, nominal)
    rows = []
    for number, named in enumerate(contestants):
        price = None if named is None else predicted(comm, operation, num_bytes, named)
        rows.append(
            CollectiveRow(
                operation=operation,
                bytes=num_bytes,
                program="gloo" if named is None else f"{named.algorithm}/{named.chunks}",
                algorithm="gloo" if named is None else named.algorithm,
                chunks=1 if named is None else named.chunks,
                chosen=number == 0,
                seconds=statistics.median(slowest[number]),
                predicted_s=price,
                bound_s=bound,
                ranks=comm.size,
            )
        )
    return rows


def _slowest(comm: Communicator, samples: list[list[float]]) -> list[list[float]]:
    """Return, of every sample, the time of the slowest rank."""
    whole = torch.tensor(samples, dtype=torch.float64)
    slowest: list[list[float]] = comm.all_reduce(whole, "max").wait().tolist()
    return slowest


def _hopeless(contestants: Sequence[Named | None], first: Sequence[float]) -> set[int]:
    """Return which programs are so slow that more samples would tell nothing.

    Not the one that would be chosen, which comes first, and not gloo.
    """
    best = min(t for named, t in zip(contestants, first, strict=True) if named is not None)
    if best < _LONG_S:
        return set()
    return {
        number
        for number, (named, seconds) in enumerate(zip(contestants, first, strict=True))
        if number and named is not None and seconds > _HOPELESS * best
    }


def _timed(comm: Communicator, call: Callable[[], object], device: str) -> float:
    synchronize = (
        _nothing if device == "cpu" else torch.get_device_module(torch.device(device)).synchronize
    )
    synchronize()
    comm.barrier().wait()
    started = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - started


def _works(call: Callable[[], object]) -> bool:
    """Tell whether gloo has a call for tensors of this device; it refuses at once, everywhere."""
    try:
        call()
    except RuntimeError:
        return False
    return True


def _nothing() -> None:
    """The host has no work under way."""


def table(comm: Communicator, rows: Sequence[CollectiveRow]) -> tuple[CollectiveTime, ...]:
    """Return measured rows as the Profile holds them."""
    shape = group_shape(comm.group)
    return tuple(
        CollectiveTime(
            operation=row.operation,
            group=shape,
            bytes=float(section_bytes(row.operation, row.bytes, comm.size)),
            algorithm=row.algorithm,
            chunks=row.chunks,
            seconds=row.seconds,
        )
        for row in rows
        if row.algorithm != "gloo"
    )


# --- links -----------------------------------------------------------------------------------


def profile_links(
    comm: Communicator, num_bytes: int = 1 << 20, device: str = "cpu"
) -> tuple[LinkFigure, ...]:
    """Measure latency and bandwidth of every kind of edge, point to point.

    The bandwidth is the slope between two sizes, so that what a swap costs at any size is no part
    of it. A fast wire needs larger messages to show what it can do.
    """
    figures = []
    for edge in Edge:
        pairs = _pairs(comm, edge)
        if not pairs:
            continue
        short = _swap_seconds(comm, pairs, 64, _SHORT_SWAPS, device)
        size = num_bytes
        some = _swap_seconds(comm, pairs, size, _LONG_SWAPS, device)
        while some < _CLEAR * short and size < _LARGEST_SWAP:
            size *= 4
            some = _swap_seconds(comm, pairs, size, _LONG_SWAPS, device)
        more = _swap_seconds(comm, pairs, 3 * size, _LONG_SWAPS, device)
        # Where swaps were disturbed, the wire must not look faster than it can be.
        rate = 2 * size / max(more - some, more / 2)
        latency = short * _IN_PROGRAM
        figures.append(LinkFigure(kind=link_name(edge), latency_s=latency, bandwidth=rate))
    return tuple(figures)


def _pairs(comm: Communicator, edge: Edge) -> list[tuple[int, int]]:
    """Return disjoint pairs of seats joined by a kind of edge."""
    free = list(range(comm.size))
    pairs = []
    while free:
        one = free.pop(0)
        other = next((seat for seat in free if comm.group.edge(one, seat) is edge), None)
        if other is not None:
            free.remove(other)
            pairs.append((one, other))
    return pairs


def _swap_seconds(
    comm: Communicator, pairs: list[tuple[int, int]], num_bytes: int, times: int, device: str
) -> float:
    """Return the time of a swap, of the slowest pair, while all pairs swap.

    A quarter of the swaps are quicker: a machine that is busy with other things makes the rest look
    worse than a program finds it.
    """
    seat = comm.group.seat(comm.rank)
    peer = next((b if a == seat else a for a, b in pairs if seat in (a, b)), None)
    out = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    into = torch.empty_like(out)
    samples = [0.0, 0.0]
    comm.barrier().wait()
    if peer is not None:
        other = comm.group.ranks[peer]
        samples.clear()
        for _ in range(times):
            started = time.perf_counter()
            comm.exchange([(out, other)], [(into, other)]).wait()
            samples.append(time.perf_counter() - started)
    mine = torch.tensor([statistics.quantiles(samples)[0]], dtype=torch.float64)
    return float(comm.all_reduce(mine, "max").wait())
