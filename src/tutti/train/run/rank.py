"""The process of one rank: `tutti train` under a launcher, or started by `tutti train` itself.

Whatever goes wrong is told in one line; the traceback goes to the rank's log.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tutti import files
from tutti.comm.errors import PeerLostError
from tutti.errors import InputError, TuttiError, error_with
from tutti.launch.identity import is_restarted, rank_of_process
from tutti.observe.folder import PLAN_FILE
from tutti.plan.files import plan_from_document
from tutti.ranks.events import Events, open_events
from tutti.ranks.standing_processes import die_with_parent
from tutti.train.run.claim import PATIENCE_S, Claim, claim
from tutti.train.run.config import TrainConfig
from tutti.train.run.planning import Job, prepare, prepared
from tutti.train.run.result import TrainResult, result_of
from tutti.train.run.starting import (
    Resume,
    check_resumed,
    check_sources,
    clear_run,
    has_checkpoints,
    require_fresh,
    require_fresh_url,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What the ranks of a launched job begin with."""

    job: Job
    resume: Resume
    claim: Claim | None = None  # of the output folder, on RANK 0

    def release(self) -> None:
        """Let go of the output folder."""
        if self.claim is not None:
            self.claim.release()


def start_together(
    config: TrainConfig,
    *,
    resume: Resume = False,
    overwrite: bool = False,
    make: Callable[[TrainConfig], Job] = prepare,
) -> Start:
    """Return the job where every rank was started alike: RANK 0 looks, decides and plans for all.

    It holds the output folder from then on. A restarted job goes on from its last checkpoint, if
    it has one: it may have failed before the first, and hosts may see a shared folder at different
    times, so the launcher cannot say --resume, and each rank must not look for itself.
    """
    from tutti.ranks.rendezvous import COMING_S, all_read, open_store, wait_for

    number = next(_starts)
    store, key = open_store(config.timeout_s), f"start {number}" if number else "start"
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == 0:
        try:
            start = _decide(config, resume, overwrite, make)
        except Exception as error:
            store.set(key, json.dumps({"error": str(error), "code": _code(error)}))
            all_read(store, key, rank, world, min(config.timeout_s, COMING_S))
            raise
        text = (config.folder / PLAN_FILE).read_text(encoding="utf-8")
        store.set(key, json.dumps({"resume": start.resume, "plan": text}))
        return start
    said = json.loads(wait_for(store, key, config.timeout_s))
    if "error" in said:
        all_read(store, key, rank, world, 0.0)
        raise error_with(int(said["code"]), f"rank 0: {said['error']}")
    if config.plan is not None:  # this rank's own file: all compare theirs when they meet
        return Start(job=make(config), resume=said["resume"])
    plan = plan_from_document(files.parse_json(said["plan"], "plan"), "plan")
    return Start(job=prepared(config, plan), resume=said["resume"])


_starts = itertools.count()  # a process may run several jobs, one after the other


def _decide(
    config: TrainConfig, resume: Resume, overwrite: bool, make: Callable[[TrainConfig], Job]
) -> Start:
    restarted = is_restarted(os.environ)
    if restarted:  # whatever the command says: it was obeyed the first time
        resume, overwrite = has_checkpoints(config), False
    check_sources(config, resume, overwrite=overwrite)
    # what the last attempt left may take a while to end; the others wait for twice as long
    held = claim(config.folder, wait_s=config.timeout_s / 2 if restarted else PATIENCE_S)
    try:
        _check_fresh(config, wanted=resume is False and not overwrite, restarted=restarted)
        job = make(config)
        check_resumed(job, resume)
        if overwrite:
            clear_run(config.folder, config.checkpoints.to)
        job.save()
    except BaseException:
        held.release()
        raise
    if held.note:
        open_events(0).send("warning", text=held.note)
    return Start(job=job, resume=resume, claim=held)


_REFUSED = ".refused"
_LAUNCH = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")


def _check_fresh(config: TrainConfig, *, wanted: bool, restarted: bool) -> None:
    """Refuse a folder with an earlier run, also when the launcher then starts the same job again.

    Launchers restart whatever fails: without a note, a forgotten --resume would become one.
    """
    note = config.folder / _REFUSED
    launch = {name: os.environ.get(name) for name in _LAUNCH}
    if restarted:
        said = json.loads(note.read_text(encoding="utf-8")) if note.is_file() else {}
        if said.get("launch") == launch:
            raise InputError(said["text"])
    elif wanted:
        try:
            require_fresh(config.folder)
            require_fresh_url(config.checkpoints.to)
        except InputError as error:
            files.write_text(note, json.dumps({"launch": launch, "text": str(error)}) + "\n")
            raise
    note.unlink(missing_ok=True)


def run_rank(
    job: Job,
    *,
    resume: Resume = False,
    events: Events | None = None,
    failed: Callable[[BaseException], None] = lambda _error: None,
) -> TrainResult:
    """Be one rank of a job until it ends; `failed` hears of an error before it is left for."""
    from tutti.ranks.rendezvous import job_secret
    from tutti.train.run.worker import run_worker

    job_secret()  # without one, nobody need open a chip

    rank = rank_of_process(job.plan, os.environ)
    said = events or open_events(rank)
    summary = run_worker(job, rank, said, resume=resume, failed=failed)
    said.send("done", **summary)
    return result_of(summary, job)


def main(arguments: list[str]) -> int:
    """Run a rank that `tutti train` started."""
    die_with_parent()
    rank = int(os.environ["RANK"])
    events = open_events(rank)
    known: list[BaseException] = []

    def failed(error: BaseException) -> None:
        if not known:  # told at once, and not again after all is closed
            known.append(error)
            events.send("error", **told(error))
            traceback.print_exception(error)

    try:
        job = Job.load(Path(arguments[0]))
        run_rank(job, resume=_resume(arguments[1:]), events=events, failed=failed)
    except BaseException as error:
        failed(error)
        return _code(error)
    return 0


def _code(error: BaseException) -> int:
    return error.exit_code if isinstance(error, TuttiError) else 1


def _resume(arguments: list[str]) -> Resume:
    for word in arguments:
        name, equals, step = word.partition("=")
        if name == "--resume":
            return int(step) if equals else True
    return False


def told(error: BaseException) -> dict[str, Any]:
    """Return what the user reads of an error; one that only says a peer is lost is no cause."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if not isinstance(error, TuttiError):
        text = f"{type(error).__name__}: {text}"
    lost: BaseException | None = error
    while lost is not None and not isinstance(lost, PeerLostError):
        lost = lost.__cause__
    return {"text": text, "cause": lost is None, "code": _code(error)}


if __name__ == "__main__":
    # torch may hang in its own clean-up when a peer is gone; everything of ours is closed by now
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
