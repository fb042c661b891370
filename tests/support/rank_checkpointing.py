"""What rank processes do in tests of checkpoints: connect, go on from a folder, train, save."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.checkpointing import kept, train
from tests.support.rank_pool import RankPool
from tests.support.rank_training import joined
from tutti.accelerator import open_accelerator
from tutti.nn.initialize import initialize
from tutti.plan.plan import Plan
from tutti.train.checkpoint import (
    Checkpointer,
    CheckpointSettings,
    Processes,
    Progress,
    Saved,
    find_latest,
)
from tutti.train.engine.engine import Engine
from tutti.train.sync.comm_links import CommLinks


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What a rank saw of a run."""

    first: int  # the step that it went on from
    losses: list[float]
    kept: list[Any]  # at the last save
    saves: list[Saved]


def run_one(
    rank: int,
    port: int,
    job: str,
    plan: Plan,
    folder: Path,
    steps: int,
    save_after: int,
    settings: CheckpointSettings,
) -> Ran:
    """Go on from the latest checkpoint, if any; save once, train on while that is under way."""
    spec = plan.model.spec
    assert spec is not None
    comm = joined(rank, port, job, plan.num_ranks)
    links = CommLinks(comm, plan, spec)
    engine = Engine(plan, spec, rank, open_accelerator("cpu"), links, clip_norm=1.0)
    keeper = Checkpointer(folder, settings, Processes(comm))
    begin(engine, keeper)
    first, losses, state = engine.step_number, [], []
    for _ in range(steps):
        losses += train(engine, 1)
        keeper.poll()
        if engine.step_number == save_after:
            state = [(k, s, v.numpy()) for k, s, v in kept(engine)]
            keeper.save(engine, Progress(step=engine.step_number, samples=7))
    loaded = [(k, s, v.numpy()) for k, s, v in kept(engine)] if steps == 0 else state
    keeper.close()
    comm.barrier().wait()
    comm.close()
    return Ran(first=first, losses=losses, kept=loaded, saves=keeper.history)


def begin(engine: Engine, keeper: Checkpointer) -> None:
    """Load the latest checkpoint, or begin anew."""
    initialize(engine.model, seed=1, deviation=0.1)
    engine.take_masters()
    if find_latest(keeper.folder) is not None:
        keeper.load(engine)


def run_processes(
    pool: RankPool,
    plan: Plan,
    folder: Path,
    *,
    steps: int,
    save_after: int = -1,
    settings: CheckpointSettings = CheckpointSettings(),  # noqa: B008  # frozen
) -> list[Ran]:
    """Run a plan with a process for each rank."""
    args = (plan, folder, steps, save_after, settings)
    return pool.meet(run_one, plan.num_ranks, *args, timeout_s=150.0)
