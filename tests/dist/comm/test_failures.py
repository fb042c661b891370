"""A rank that is killed or stopped in the middle of a collective: all others name it, in time."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import psutil
import pytest
import torch

from tests.dist.comm.calls import Case, Seating, call, opened
from tests.support.rank_pool import RankPool
from tutti.collective import Operation, algorithms
from tutti.collective.builder import CATALOG
from tutti.comm import CommError
from tutti.comm.choice import Named
from tutti.comm.places import Topology
from tutti.comm.run import Run

TIMEOUT_S = 1.0
SLACK_S = 4.0  # of a machine with other things to do
SEATING = Seating("doomed", ((0, 1), (2, 3)))
ONE_ISLAND = Seating("one-island", ((0, 1, 2),))


def doomed(rank: int, case: Case, port: int, victim: int, at: int, how: int) -> object:
    """Run a call on which the victim ends at its `at`-th message; tell what this rank saw."""
    comm = opened(rank, case.seating, port, timeout_s=TIMEOUT_S)
    comm.chooser.obey(case.operation, case.named)
    comm.barrier().wait()
    if rank == victim:
        _end_at(at, how)
    started = time.monotonic()
    try:
        for _ in range(100):  # some ranks need nothing of the victim in the first call
            call(comm, case)
            comm.barrier().wait()
    except CommError as error:
        seen = (type(error).__name__, error.peer, str(error), time.monotonic() - started)
        with pytest.raises(CommError):
            comm.barrier().wait()  # it is over, and stays so
        comm.close()
        return seen
    return ("nothing", None, "", time.monotonic() - started)


def _end_at(at: int, how: int) -> None:
    """End this process when it sends or asks for its `at`-th message."""
    count = 0
    send, receive = Run.send, Run.receive

    def counted(function):  # type: ignore[no-untyped-def]
        def inner(*args, **options):  # type: ignore[no-untyped-def]
            nonlocal count
            if count == at:
                os.kill(os.getpid(), how)
            count += 1
            return function(*args, **options)

        return inner

    Run.send, Run.receive = counted(send), counted(receive)  # type: ignore[method-assign]


def check_end(case: Case, victim: int, at: int, how: int) -> None:
    pool = RankPool(case.seating.world)
    try:
        ranks = range(case.seating.world)
        pool.start(doomed, ranks, case, pool.port, victim, at, how)
        for rank in ranks:
            if rank == victim:
                continue
            kind, peer, text, seconds = pool.answer(rank, 30)
            assert peer == victim, f"rank {rank} blames {peer}: {kind} {text}"
            assert f"rank {victim}" in text
            assert seconds < TIMEOUT_S + SLACK_S, text
        others = [pool.pid(rank) for rank in ranks if rank != victim]
        last = pool.pid(victim)
        with contextlib.suppress(ProcessLookupError):  # a stopped one would keep the pool waiting
            os.kill(last, signal.SIGKILL)
    finally:
        pool.close()
    for pid in (*others, last):
        assert not psutil.pid_exists(pid), f"process {pid} is left over"


def case_of(operation: Operation, algorithm: str, seating: Seating) -> Case:
    number = {Operation.ALL_TO_ALL: seating.world**2}.get(operation, seating.world)
    single = (Operation.ALL_REDUCE, Operation.REDUCE, Operation.BROADCAST, Operation.BARRIER)
    counts = (5000,) if operation in single else (1500,) * number
    named = Named(algorithm=algorithm, chunks=1)
    return Case(seating, operation.value, named, counts, torch.float32, root=0)


def every_end() -> list[tuple[Operation, str, Seating, int]]:
    """Return every program with every message at which a rank may end."""
    found = []
    for operation in CATALOG:
        if operation is Operation.SEND_RECEIVE:
            continue
        for seating in (SEATING, ONE_ISLAND):
            places = tuple(seating.place(rank) for rank in range(seating.world))
            group = Topology(places).group(range(seating.world))
            for algorithm in algorithms(operation, group):
                if seating is ONE_ISLAND and algorithm != "native":
                    continue
                found += [(operation, algorithm, seating, at) for at in range(5)]
    return found


EVERY = every_end()
HOW = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    ("operation", "algorithm"),
    [("all_reduce", "hierarchical"), ("all_to_all", "rail"), ("broadcast", "leader")],
)
def test_everybody_names_the_rank_that_ended(operation: str, algorithm: str, how: str) -> None:
    check_end(case_of(Operation(operation), algorithm, SEATING), 1, 1, HOW[how])


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("operation", "algorithm", "seating", "at"), EVERY)
def test_at_every_step_of_every_program(
    operation: Operation, algorithm: str, seating: Seating, at: int, how: str
) -> None:
    check_end(case_of(operation, algorithm, seating), seating.world - 1, at, HOW[how])


def lazy(rank: int, seating: Seating, port: int) -> object:
    comm = opened(rank, seating, port, timeout_s=TIMEOUT_S)
    comm.barrier().wait()
    if rank == 1:
        time.sleep(TIMEOUT_S + 2.0)
    try:
        comm.all_reduce(torch.ones(10)).wait()
    except CommError as error:
        return type(error).__name__, error.peer, str(error)
    finally:
        comm.close()
    return None


def test_a_rank_that_does_not_enter_is_named() -> None:
    pool = RankPool(4)
    try:
        for kind, peer, text in pool.run(lazy, range(4), SEATING, pool.port):
            assert (kind, peer) == ("CommTimeoutError", 1), text
            assert "has not entered it" in text
    finally:
        pool.close()


def owes_a_message(rank: int, seating: Seating, port: int) -> object:
    comm = opened(rank, seating, port, timeout_s=TIMEOUT_S)
    comm.barrier().wait()
    try:
        if rank == 1:  # alive, in no operation, and sends nothing
            time.sleep(3 * TIMEOUT_S + 2.0)
            comm.barrier().wait()
        comm.receive(torch.ones(10), 1).wait()
    except CommError as error:
        return type(error).__name__, error.peer, str(error)
    finally:
        comm.close()
    return None


def test_a_rank_that_sends_nothing_is_named() -> None:
    pool = RankPool(2)
    seating = Seating("silent", ((0,), (1,)))
    try:
        for kind, peer, text in pool.run(owes_a_message, range(2), seating, pool.port):
            assert (kind, peer) == ("CommTimeoutError", 1), text
            assert "rank 1 is alive but has not sent it" in text
    finally:
        pool.close()


def leaves_early(rank: int, seating: Seating, port: int) -> object:
    comm = opened(rank, seating, port, timeout_s=5.0)
    comm.all_reduce(torch.ones(10)).wait()
    if rank == 0:
        comm.close()
        return None
    started = time.monotonic()
    try:
        comm.all_reduce(torch.ones(10)).wait()
    except CommError as error:
        return error.peer, time.monotonic() - started
    return "nothing"


def test_a_rank_that_left_is_named_at_once() -> None:
    pool = RankPool(2)
    seating = Seating("leaving", ((0,), (1,)))
    try:
        _, (peer, seconds) = pool.run(leaves_early, range(2), seating, pool.port)
        assert peer == 0
        assert seconds < 4.0
    finally:
        pool.close()


def other_sizes(rank: int, seating: Seating, port: int) -> object:
    comm = opened(rank, seating, port, timeout_s=3.0)
    try:
        comm.all_reduce(torch.ones(10 + rank)).wait()
    except CommError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("islands", [((0,), (1,)), ((0, 1),)])
def test_unequal_sizes_are_an_error_on_all_ranks(islands: tuple[tuple[int, ...], ...]) -> None:
    pool = RankPool(2)
    try:
        for text in pool.run(other_sizes, range(2), Seating("sizes", islands), pool.port):
            assert "same sizes" in text
    finally:
        pool.close()


def comes_late(rank: int, seating: Seating, port: int) -> object:
    if rank == 1:
        return None
    try:
        opened(rank, seating, port, start_timeout_s=1.0)
    except CommError as error:
        return error.peer, str(error)
    return "nothing"


def test_a_rank_that_never_starts_is_named() -> None:
    pool = RankPool(3)
    try:
        found = pool.run(comes_late, range(3), Seating("late", ((0, 1, 2),)), pool.port)
        for peer, text in (found[0], found[2]):
            assert peer == 1
            assert "have not come: 1" in text
    finally:
        pool.close()
