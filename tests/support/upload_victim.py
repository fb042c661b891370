"""A small run that sends every checkpoint to a URL, and may be killed while it does.

`python -m tests.support.upload_victim` has imported everything and waits for runs to start: a line
`[folder, url, steps]` forks one. It answers with its process id, and with its exit status when it
is over. The run goes on from the newest checkpoint that its folder or its URL has, and writes every
step's loss beside the folder.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import fsspec.implementations.http  # noqa: F401  # imported here, not in every fork
import torch

from tests.support.any_plan import FOUR, PLAIN, Draft, level
from tests.support.checkpointing import Run, run
from tests.support.training import in_fp32
from tutti.ranks.standing_processes import die_with_parent
from tutti.train.checkpoint import CheckpointSettings, find_latest
from tutti.train.checkpoint.remote import RemoteRun
from tutti.train.checkpoint.storage import prepare_format

prepare_format()
PLAN = in_fp32(Draft(tied=True).line((FOUR, [{"count": 1}])).plan(PLAIN, level(1)), "adamw")


def main(folder: Path, url: str, steps: int) -> None:
    die_with_parent()
    torch.set_num_threads(1)

    def work(one: Run) -> None:
        one.begin()
        if find_latest(folder) is not None or RemoteRun(url).newest_first():
            one.checkpointer.load(one.engine)
        one.checkpointer.catch_up()
        with log_of(folder).open("a") as log:
            while one.engine.step_number < steps:
                loss = one.train(1)[0]
                print(json.dumps([one.engine.step_number, loss]), file=log, flush=True)
                one.save()
                outcome = one.checkpointer.wait()
                assert outcome is not None
                assert not outcome.problem, outcome.problem
        one.checkpointer.close()

    run(PLAN, folder, work, settings=CheckpointSettings(keep_last=2, to=url))


def log_of(folder: Path) -> Path:
    """Where the losses go."""
    return folder.parent / f"{folder.name}.log"


def fork(folder: str, url: str, steps: int) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        main(Path(folder), url, steps)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def serve() -> None:
    """Start runs as they are asked for."""
    die_with_parent()
    for line in sys.stdin:
        words: Any = json.loads(line)
        child = fork(*words)
        print(child, flush=True)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
