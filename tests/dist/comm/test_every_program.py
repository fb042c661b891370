"""Every operation by every algorithm equals the single-process result, to the last bit."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.dist.comm.calls import Case, Seating, as_bytes, twice, values
from tests.support.rank_pool import RankPool
from tutti.collective import Operation, algorithms
from tutti.collective.interpret import interpret
from tutti.comm.choice import Named
from tutti.comm.places import Topology

SEATINGS = (
    Seating("pair", ((0, 1),)),
    Seating("two", ((0,), (1,))),
    Seating("uneven", ((0, 3, 1), (4, 2)), rails=(0, 1, 0, 2, 1)),
    Seating("square", ((0, 1), (2, 3)), rates=(1.0, 1.0, 4.0, 4.0)),
    Seating("three", ((5, 0), (1, 4, 2), (3,)), rates=(1.0, 2.0, 2.0, 4.0, 1.0, 3.0)),
    Seating("eight", ((0, 2, 4, 6), (1, 3, 5, 7))),
)
DTYPES = (torch.float32, torch.int64, torch.bfloat16, torch.float16, torch.float64, torch.uint8)
ACROSS = {
    ("all_reduce", "hierarchical"): ("ring", "doubling", "direct", "tree", "binary"),
    ("all_reduce", "leader"): ("ring", "doubling", "direct", "tree"),
    ("all_gather", "hierarchical"): ("ring", "doubling", "direct"),
    ("reduce_scatter", "hierarchical"): ("ring", "doubling", "direct"),
    ("broadcast", "hierarchical"): ("tree", "binary", "ring"),
}
SIZES = st.sampled_from([0, 1, 2, 3, 7, 64, 255, 1000, 2049, 5003])


@functools.cache
def group_of(seating: Seating):
    places = tuple(seating.place(rank) for rank in range(seating.world))
    return Topology(places).group(range(seating.world))


def sections(operation: Operation, world: int) -> int:
    if operation is Operation.ALL_TO_ALL:
        return world * world
    if operation in (
        Operation.REDUCE_SCATTER,
        Operation.ALL_GATHER,
        Operation.GATHER,
        Operation.SCATTER,
    ):
        return world
    return 1


@st.composite
def cases(draw: st.DrawFn, operation: Operation) -> Case:
    seating = draw(st.sampled_from(SEATINGS))
    algorithm = draw(st.sampled_from(algorithms(operation, group_of(seating))))
    number = sections(operation, seating.world)
    equal = draw(st.booleans())
    counts = [draw(SIZES)] * number if equal else [draw(SIZES) for _ in range(number)]
    if operation is Operation.ALL_TO_ALL:
        counts = [count // 5 for count in counts]
    across = ACROSS.get((operation.value, algorithm))
    return Case(
        seating=seating,
        operation=operation.value,
        named=Named(
            algorithm=algorithm,
            chunks=draw(st.sampled_from([1, 1, 2, 3, 5])),
            connections=draw(st.sampled_from([1, 2])),
            across=draw(st.sampled_from(across)) if across else None,
        ),
        counts=tuple(counts),
        dtype=draw(st.sampled_from(DTYPES)),
        root=draw(st.integers(0, seating.world - 1)),
        strided=draw(st.booleans()),
        seed=draw(st.integers(0, 5)),
    )


def expected(case: Case) -> dict[int, bytes]:
    """Return what the interpreter makes of the same program in one process."""
    operation, world = Operation(case.operation), case.seating.world
    root = case.root if operation.has_root else None
    program = case.named.build(operation, group_of(case.seating), root)
    wide = {torch.float32: np.float32, torch.float64: np.float64}.get(case.dtype, np.int64)
    inputs = {}
    for rank in range(world):
        count = case.counts[0] if len(case.counts) == 1 else sum(case.counts)
        if operation in (Operation.ALL_GATHER, Operation.GATHER):
            count = case.counts[rank]
        if operation is Operation.ALL_TO_ALL:
            count = sum(case.counts[rank * world : (rank + 1) * world])
        if operation in (Operation.BROADCAST, Operation.SCATTER) and rank != case.root:
            continue
        exact = torch.int64 if wide is np.int64 else case.dtype
        inputs[rank] = values(case, rank, count).to(exact).numpy().astype(wide)
    counts = case.counts[0] if len(case.counts) == 1 else case.counts
    outputs = interpret(program, inputs, counts).outputs
    return {
        rank: as_bytes(torch.from_numpy(found).to(case.dtype))
        for rank, found in outputs.items()
        if not (operation in (Operation.REDUCE, Operation.GATHER) and rank != case.root)
    }


def check(pool: RankPool, case: Case) -> None:
    answers = pool.run(twice, range(case.seating.world), case, pool.port)
    due = expected(case) if case.operation != "barrier" else {}
    for rank, (first, second) in enumerate(answers):
        assert first == second, "not the same bits when repeated"
        if rank in due:
            assert first == due[rank], f"rank {rank}"


OPERATIONS = [o for o in Operation if o is not Operation.SEND_RECEIVE]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_program_gives_the_single_process_result(
    pool: RankPool, operation: Operation
) -> None:
    @settings(max_examples=settings().max_examples // 5)
    @given(case=cases(operation))
    def run(case: Case) -> None:
        check(pool, case)

    run()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_algorithm_is_left_out(pool: RankPool, operation: Operation) -> None:
    for seating in SEATINGS[2:5]:
        for algorithm in algorithms(operation, group_of(seating)):
            number = sections(operation, seating.world)
            counts = tuple(37 + 5 * k for k in range(number))
            named = Named(algorithm=algorithm, chunks=2)
            root = seating.world - 1
            check(pool, Case(seating, operation.value, named, counts, torch.float32, root=root))
