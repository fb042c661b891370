"""What rank processes do in tests of training: connect, train as one rank of a plan, leave."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from tests.support.rank_pool import SECRET, RankPool
from tests.support.training import Trained, in_fp32, in_precision, put_together, train_rank
from tutti.comm import Communicator, connect
from tutti.comm.places import Place
from tutti.plan.plan import Plan
from tutti.train.sync.comm_links import CommLinks

TIMEOUT_S = 120.0  # of a machine with much else to do


def joined(
    rank: int,
    port: int,
    job: str,
    size: int,
    timeout_s: float = TIMEOUT_S,
    place: Place | None = None,
) -> Communicator:
    store = dist.PrefixStore(job, dist.TCPStore("127.0.0.1", port))
    return connect(store, rank, size, place=place, timeout_s=timeout_s, secret=SECRET)


def train_one(
    rank: int,
    port: int,
    job: str,
    plan: Plan,
    optimizers: tuple[str, ...],
    clip: float | None,
    precision: str = "fp32",
) -> list[Trained]:
    """Train once with each optimizer, as one rank."""
    comm = joined(rank, port, job, plan.num_ranks)
    plans = [
        in_fp32(plan, optimizer)
        if precision == "fp32"
        else in_precision(plan, precision, optimizer)
        for optimizer in optimizers
    ]
    found = [_train(comm, own, clip) for own in plans]
    comm.barrier().wait()
    comm.close()
    return found


def _train(comm: Communicator, plan: Plan, clip: float | None) -> Trained:
    assert plan.model.spec is not None
    links = CommLinks(comm, plan, plan.model.spec)
    found = train_rank(plan, plan.model.spec, links, clip=clip)
    found.groups = tuple(set(links.groups) ^ set(links.foreseen))
    found.weights, found.gradients = _plain(found.weights), _plain(found.gradients)
    return found


def _plain(parts: list[Any]) -> list[Any]:
    """Return parts that travel as bytes: tensors would be shared through open files."""
    return [(name, slices, value.numpy()) for name, slices, value in parts]


def train_processes(
    pool: RankPool,
    plan: Plan,
    optimizers: tuple[str, ...],
    clip: float | None = 1.0,
    precision: str = "fp32",
) -> list[Trained]:
    """Train a plan with a process for each rank."""
    assert plan.model.spec is not None
    answers = pool.meet(
        train_one, plan.num_ranks, plan, optimizers, clip, precision, timeout_s=280.0
    )
    return [put_together(plan.model.spec, ranks) for ranks in zip(*answers, strict=True)]
