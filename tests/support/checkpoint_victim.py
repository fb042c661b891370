"""A small run that saves at every step, whose ranks are processes that may be killed.

`python -m tests.support.checkpoint_victim` has imported everything and waits for runs to start: a
line `[folder, port, job, steps, event]` forks both ranks. It answers with their process ids, and
with their exit statuses when they are over. A rank goes on from the latest checkpoint and logs
every step's loss as JSON. With an event, rank 0 kills itself just before the so-manyth time that it
opens, makes, renames or deletes something in the folder, so that every moment of a save can be met.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from tests.support.any_plan import FOUR, PLAIN, Draft, level
from tests.support.checkpointing import train
from tests.support.rank_checkpointing import begin
from tests.support.rank_training import joined
from tests.support.training import in_fp32
from tutti.accelerator import open_accelerator
from tutti.ranks.standing_processes import die_with_parent
from tutti.train.checkpoint import Checkpointer, CheckpointSettings, Processes, Progress
from tutti.train.checkpoint.storage import prepare_format
from tutti.train.engine.engine import Engine
from tutti.train.sync.comm_links import CommLinks

prepare_format()
PLAN = in_fp32(Draft(tied=True).line((FOUR, [{"count": 2}])).plan(PLAIN, level(1)), "adamw")
EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


def kill_at(event: int, folder: Path) -> None:
    """End this process, as kill -9 does, before it changes the folder for the so-manyth time."""
    count = itertools.count(1)
    below = str(folder.resolve())

    def watch(name: str, args: tuple[Any, ...]) -> None:
        if name in EVENTS and isinstance(args[0], (str, os.PathLike)):
            path = os.path.realpath(os.fspath(args[0]))
            # names that rmtree looks up inside an open folder are relative
            inside = path.startswith(below) or (name != "open" and not os.path.isabs(args[0]))
            if inside and next(count) == event:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def main(folder: Path, port: int, job: str, rank: int, steps: int, event: int) -> None:
    die_with_parent()
    torch.set_num_threads(1)
    spec = PLAN.model.spec
    assert spec is not None
    comm = joined(rank, port, job, PLAN.num_ranks)
    engine = Engine(
        PLAN, spec, rank, open_accelerator("cpu"), CommLinks(comm, PLAN, spec), clip_norm=1.0
    )
    if event:
        kill_at(event, folder)
    keeper = Checkpointer(folder, CheckpointSettings(keep_last=2), Processes(comm))
    begin(engine, keeper)
    print(json.dumps({"first": engine.step_number}), flush=True)
    while engine.step_number < steps:
        loss = train(engine, 1)[0]
        print(json.dumps({"step": engine.step_number, "loss": loss}), flush=True)
        keeper.save(engine, Progress(step=engine.step_number))
    keeper.close()
    comm.close()


def fork(rank: int, folder: Path, port: int, job: str, steps: int, event: int) -> int:
    """Start a rank as a fork of this process, which never had a second thread."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        log = os.open(log_of(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        main(folder, port, job, rank, steps, event if rank == 0 else 0)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def log_of(folder: Path, rank: int) -> Path:
    """Where a rank's lines go."""
    return folder.parent / f"{folder.name}-{rank}.log"


def serve() -> None:
    """Start runs as they are asked for."""
    die_with_parent()
    for line in sys.stdin:
        folder, port, job, steps, event = json.loads(line)
        children = [fork(rank, Path(folder), port, job, steps, event) for rank in range(2)]
        print(json.dumps(children), flush=True)
        for child in children:  # nobody's id is free for another process before all are over
            os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps(statuses), flush=True)


if __name__ == "__main__":
    serve()
