"""The process of one rank: `tutti train` under a launcher, or started by `tutti train` itself.

Whatever goes wrong is told in one line; the traceback goes to the rank's log.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Any

from tutti import files
from tutti.comm.errors import PeerLostError
from tutti.comm.ranks import die_with_parent
from tutti.errors import TuttiError
from tutti.launch.identity import is_restarted, rank_of_process
from tutti.observe.folder import PLAN_FILE
from tutti.plan.files import plan_from_document
from tutti.train.run.config import TrainConfig
from tutti.train.run.events import Events, open_events
from tutti.train.run.planning import Job, prepare, prepared
from tutti.train.run.trainer import TrainResult, result_of


def prepare_together(config: TrainConfig) -> Job:
    """Return the job where every rank was started with the same file: rank 0 plans for all."""
    if config.plan is not None:
        job = prepare(config)
        if int(os.environ["RANK"]) == 0:
            job.save()
        return job
    from tutti.train.run.rendezvous import open_store, wait_for

    store = open_store(config.timeout_s)
    if int(os.environ["RANK"]) == 0:
        try:
            job = prepare(config)
            job.save()
        except TuttiError as error:
            store.set("plan", f"!{error}")
            raise
        store.set("plan", (config.folder / PLAN_FILE).read_text(encoding="utf-8"))
        return job
    text = wait_for(store, "plan", config.timeout_s)
    if text.startswith("!"):
        raise TuttiError(f"rank 0 could not plan: {text[1:]}")
    return prepared(config, plan_from_document(files.parse_json(text, "plan"), "plan"))


def resume_together(config: TrainConfig) -> bool:
    """Tell whether a job that its launcher restarted has a checkpoint; one process looks for all.

    A job may fail before its first checkpoint, and hosts may see a shared folder at different
    times: so the launcher cannot say --resume, and each rank must not look for itself.
    """
    from tutti.train.checkpoint.folders import find_latest
    from tutti.train.run.rendezvous import open_store, wait_for
    from tutti.train.run.worker import CHECKPOINTS

    if not is_restarted(os.environ):
        return False
    store = open_store(config.timeout_s)
    if int(os.environ["RANK"]) == 0:
        found = find_latest(config.folder / CHECKPOINTS)
        store.set("resume", "no" if found is None else "yes")
    return wait_for(store, "resume", config.timeout_s) == "yes"


def run_rank(job: Job, *, resume: bool = False, events: Events | None = None) -> TrainResult:
    """Be one rank of a job until it ends."""
    from tutti.train.run.rendezvous import job_secret
    from tutti.train.run.worker import Worker

    job_secret()  # without one, nobody need open a chip

    rank = rank_of_process(job.plan, os.environ)
    said = events or open_events(rank)
    worker = Worker(job, rank, said)
    summary = worker.run(resume=resume)
    said.send("done", **summary)
    return result_of(summary, job)


def main(arguments: list[str]) -> int:
    """Run a rank that `tutti train` started."""
    die_with_parent()
    rank = int(os.environ["RANK"])
    events = open_events(rank)
    try:
        run_rank(Job.load(Path(arguments[0])), resume="--resume" in arguments, events=events)
    except BaseException as error:
        traceback.print_exc()
        events.send("error", **told(error))
        return 1
    return 0


def told(error: BaseException) -> dict[str, Any]:
    """Return what the user reads of an error; one that only says a peer is lost is no cause."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if not isinstance(error, TuttiError):
        text = f"{type(error).__name__}: {text}"
    lost: BaseException | None = error
    while lost is not None and not isinstance(lost, PeerLostError):
        lost = lost.__cause__
    return {"text": text, "cause": lost is None}


if __name__ == "__main__":
    # torch may hang in its own clean-up when a peer is gone; everything of ours is closed by now
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
