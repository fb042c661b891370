"""What rank processes do in tests of live movement: one plan's state into another's engines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpointing import kept, train
from tests.support.rank_training import joined
from tutti.accelerator import open_accelerator
from tutti.hardware.topology import Position
from tutti.launch.identity import used_chips
from tutti.nn.initialize import initialize
from tutti.plan.plan import Plan
from tutti.train.checkpoint import Checkpointer, CheckpointSettings, Processes, Progress
from tutti.train.elastic import held_state
from tutti.train.elastic.held_state import HeldState, fill, offer
from tutti.train.engine.engine import Engine
from tutti.train.sync.comm_links import CommLinks


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """A rank of the second plan: what it has by the live way and by the way over disk."""

    live: list[Any]
    disk: list[Any]
    numbers: dict[str, int]  # that crossed from rank to rank, by kind


def chips_of(before: Plan, after: Plan) -> list[Position]:
    """Return all chips of two plans; a process each."""
    return list(dict.fromkeys([*used_chips(after), *used_chips(before)]))


def move_one(place: int, port: int, job: str, before: Plan, after: Plan, folder: Path) -> Moved:
    """Train a step under one plan, save it, and go on under the other by both ways."""
    held, comms, chips = [], [], chips_of(before, after)
    rank = used_chips(before).get(chips[place])
    if rank is not None:
        engine, comm = _engine(rank, port, f"{job}-before", before)
        comms.append(comm)
        initialize(engine.model, seed=1, deviation=0.1)
        engine.take_masters()
        train(engine, 1)
        saver = Checkpointer(folder, CheckpointSettings(asynchronous=False), Processes(comm))
        saver.save(engine, Progress(step=1, samples=before.job.global_batch))
        saver.close()
        held.append(HeldState.taken(engine, Progress(step=1, samples=before.job.global_batch)))
    state = joined(place, port, f"{job}-state", len(chips))
    comms.append(state)
    numbers: dict[str, int] = {}
    live, disk = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(held_state, "find_moves", _counting(held_state.find_moves, numbers))
        control = state.control("control")
        rank = used_chips(after).get(chips[place])
        if rank is not None:
            engine, comm = _engine(rank, port, f"{job}-after", after)
            comms.append(comm)
            fill(engine, control, held, 1)
            live = [(k, s, v.numpy()) for k, s, v in kept(engine)]
            other, comm = _engine(rank, port, f"{job}-disk", after)
            comms.append(comm)
            loader = Checkpointer(folder, CheckpointSettings(), Processes(comm))
            loader.load(other)
            loader.close()
            disk = [(k, s, v.numpy()) for k, s, v in kept(other)]
        else:
            offer(control, held, 1)
    state.barrier().wait()
    for comm in comms:
        comm.close()
    return Moved(live=live, disk=disk, numbers=numbers)


def _engine(rank: int, port: int, job: str, plan: Plan) -> Any:
    spec = plan.model.spec
    assert spec is not None
    comm = joined(rank, port, job, plan.num_ranks)
    links = CommLinks(comm, plan, spec)
    return Engine(plan, spec, rank, open_accelerator("cpu"), links, clip_norm=1.0), comm


def _counting(real: Any, numbers: dict[str, int]) -> Any:
    def find_moves(offers: Any, wants: Any) -> Any:
        moves, missing = real(offers, wants)
        for move in moves:
            if move.source != move.target:
                kind = move.key.partition("/")[0]
                numbers[kind] = numbers.get(kind, 0) + move.rectangle.count
        return moves, missing

    return find_moves
