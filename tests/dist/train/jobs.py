"""What rank processes do in the tests of links; imports little, since every rank does."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch

from tests.support.rank_training import joined
from tests.support.training import (
    batch_of,
    batches_of,
    engine_of,
    first_index,
    in_fp32,
    settings,
)
from tutti.accelerator import open_accelerator
from tutti.collective import Operation
from tutti.comm import CommError
from tutti.comm.places import place_of
from tutti.errors import InputError
from tutti.nn.initialize import initialize
from tutti.plan.plan import Plan, RankMap
from tutti.train.engine.engine import Engine
from tutti.train.run.tracing import rank_spans
from tutti.train.sync.comm_links import CommLinks


def links_of(rank: int, port: int, job: str, plan: Plan) -> CommLinks:
    assert plan.model.spec is not None
    return CommLinks(joined(rank, port, job, plan.num_ranks), plan, plan.model.spec)


def sums(rank: int, port: int, job: str, plan: Plan) -> list[float]:
    """Add numbers whose sum needs more bits than bfloat16 keeps on the way."""
    links = links_of(rank, port, job, plan)
    everyone = tuple(range(plan.num_ranks))
    small = 2.0**-8 if rank else 1.0  # 1 + 2⁻⁸ is 1 in bfloat16; 1 + 3·2⁻⁸ is not
    whole = torch.full((64,), small, dtype=torch.bfloat16)
    links.all_reduce(everyone, whole).wait()
    counts = [10, 0, 50, 4]
    out = torch.zeros(counts[rank], dtype=torch.bfloat16)
    spent = torch.full((64,), small, dtype=torch.bfloat16)
    links.reduce_scatter(everyone, spent, counts, out).wait()
    again = torch.zeros(64, dtype=torch.bfloat16)
    links.all_gather(everyone, out, counts, again).wait()
    links.comm.close()
    return [*whole.unique().tolist(), *again.unique().tolist()]


def chosen(rank: int, port: int, job: str, plan: Plan) -> list[str]:
    """Return the programs of small and large reductions, of gathers, and of in-block sums."""
    links = links_of(rank, port, job, plan)
    found = []
    for use in ("gradients", "parameters", "block"):
        chooser = links._communicator(tuple(range(plan.num_ranks)), use).chooser
        for operation in (Operation.ALL_REDUCE, Operation.ALL_GATHER, Operation.ALL_TO_ALL):
            found += [chooser.choose(operation, size).algorithm for size in (1 << 10, 1 << 24)]
    links.comm.close()
    return found


def swapped(rank: int, port: int, job: str, plan: Plan) -> list[list[float]]:
    """Send unequal rows around, two columns wide; some ranks get nothing from others."""
    links = links_of(rank, port, job, plan)
    group = links.group(tuple(range(4)))
    send = [(rank + target) % 3 for target in range(4)]
    receive = [(source + rank) % 3 for source in range(4)]
    rows = [[10.0 * rank + target] * 2 for target in range(4) for _ in range(send[target])]
    out = group.all_to_all(torch.tensor(rows).view(-1, 2), send, receive)
    links.comm.close()
    return out.tolist()


def traced(rank: int, port: int, job: str, plan: Plan) -> dict[str, Any]:
    """Run a step where the cluster says that the chips are; return what a trace is made of."""
    cluster, spec = plan.cluster.cluster, plan.model.spec
    assert cluster is not None
    assert spec is not None
    place = place_of(cluster, RankMap(plan).place(rank).chip)
    comm = joined(rank, port, job, plan.num_ranks, place=place)
    links = CommLinks(comm, plan, spec)
    engine = engine_of(plan, spec, links)
    links.forget_programs()
    engine.step(batches_of(engine, 0), settings())
    found = rank_spans(engine, links.programs()).to_document()
    comm.barrier().wait()
    comm.close()
    return found


def refused(rank: int, port: int, job: str, plan: Plan) -> str:
    """Return why no links can be made."""
    comm = joined(rank, port, job, plan.num_ranks)
    assert plan.model.spec is not None
    with pytest.raises(InputError) as caught:
        CommLinks(comm, plan, plan.model.spec)
    comm.barrier().wait()
    comm.close()
    return str(caught.value)


def too_few(rank: int, port: int, job: str, plan: Plan) -> str:
    comm = joined(rank, port, job, 1)
    assert plan.model.spec is not None
    with pytest.raises(InputError) as caught:
        CommLinks(comm, plan, plan.model.spec)
    comm.close()
    return str(caught.value)


def doomed(
    rank: int, port: int, job: str, plan: Plan, victim: int, how: int, timeout_s: float
) -> tuple[int | None, str, float]:
    """Train until the victim ends itself in the middle of the second step; tell what one sees."""
    plan = in_fp32(plan, "sgd")
    spec = plan.model.spec
    assert spec is not None
    comm = joined(rank, port, job, plan.num_ranks, timeout_s)
    engine = Engine(plan, spec, rank, open_accelerator("cpu"), CommLinks(comm, plan, spec))
    initialize(engine.model, seed=1, deviation=0.1)
    engine.take_masters()
    started = time.monotonic()

    def batches(micro_batch: int):  # type: ignore[no-untyped-def]
        nonlocal started
        if engine.step_number == 2 and micro_batch == 1:
            started = time.monotonic()
            if rank == victim:
                os.kill(os.getpid(), how)
        first = first_index(plan, engine.seat, micro_batch)
        indices = range(first, first + engine.seat.replica.sequences)
        whole = batch_of(spec, 0, indices, plan.job.sequence_length)
        return whole.share(spec, engine.seat.replica.cp, engine.seat.place.cp)

    try:
        for _ in range(5):
            engine.step(batches, settings())
    except CommError as error:
        comm.close()
        return error.peer, str(error), time.monotonic() - started
    return None, "nothing happened", 0.0
