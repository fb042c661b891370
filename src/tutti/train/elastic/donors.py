"""Who gives state to a generation: its seats to each other, and processes that have no seat in it.

A process without a seat (its host is drained, its chip is not in the new plan) meets the seats in a
group of its own, gives what they lack, and has no further part.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from tutti.comm import Communicator
from tutti.comm.connect import connect
from tutti.comm.entry.store import PrefixedStore, StoreClient
from tutti.elastic.messages import Order, Source
from tutti.ranks import rendezvous
from tutti.train.elastic.held_state import HeldState, offer
from tutti.train.elastic.host_copies import kept_for_others, labelled, read_copy
from tutti.train.run.planning import Job

GROUP = "state"  # where seats and donors meet


def offers_of(order: Order, chip: str, kept: HeldState | None, memory: Path) -> list[HeldState]:
    """Return what a process offers: its own state, and copies on its host that count."""
    offers = [kept] if kept is not None else []
    source = order.source
    assert source is not None
    if source.kind != "memory":
        return offers
    everybody = (*order.seats, *order.donors)
    host = next(seat.host for seat in everybody if seat.chip == chip)
    first = min((s for s in everybody if s.host == host), key=lambda s: s.rank)
    there = {seat.chip for seat in everybody}
    for copied, generation, step, label in labelled(memory):
        if generation not in source.generations or step != source.step:
            continue
        if copied in source.holders:
            continue
        orphan = copied not in there and first.chip == chip
        if copied == chip or orphan:
            offers.append(read_copy(label))
    if first.chip == chip:
        offers += _for_others(source, host, memory)
    return offers


def _for_others(source: Source, host: str, memory: Path) -> list[HeldState]:
    """Return the copies that this host keeps for lost ones, as far as they count."""
    wanted = {copied for copied, keeper in source.elsewhere if keeper == host}
    return [
        read_copy(label)
        for copied, generation, step, label in kept_for_others(memory)
        if copied in wanted and generation in source.generations and step == source.step
    ]


def connect_with_donors(
    order: Order, rank: int, store: StoreClient, job: Job | None = None
) -> Communicator:
    """Return the group of the seats and donors of a generation; only host memory crosses it."""
    timeout_s = job.config.timeout_s if job is not None else 300.0
    return connect(
        PrefixedStore(GROUP, store),
        rank,
        len(order.seats) + len(order.donors),
        timeout_s=timeout_s,
        start_timeout_s=timeout_s,
        secret=rendezvous.job_secret(),
        stranger=rendezvous.name_stranger,
    )


def give(
    order: Order,
    rank: int,
    store: StoreClient,
    offers: list[HeldState],
    stack: ExitStack,
    opened: Callable[[Communicator], None],
) -> None:
    """Give the seats of a generation what they lack; return when all have their state."""
    assert order.source is not None
    comm = connect_with_donors(order, rank, store)
    stack.callback(comm.close)
    opened(comm)
    offer(comm.control("control"), offers, order.source.step)
    comm.barrier().wait()
