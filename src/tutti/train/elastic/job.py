"""`tutti train` of a file with `elastic:`: the leader and the first agent in one.

Without `elastic.listen` all chips of the plan are this machine's; with it, those of one node are,
and agents on other hosts bring theirs. With `elastic.store` another host may come to lead; then
this one goes on as an agent.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tutti.elastic.agent import Agent
from tutti.elastic.agent_settings import AgentSettings
from tutti.elastic.etcd_follower import Candidate, Follower
from tutti.elastic.events import Fatal, Phase
from tutti.elastic.join import (
    JOB_FILE,
    RANK_MODULE,
    SECRET_IN_RUN,
    address_of,
    agent_secret,
    chip_environment,
    known_job,
    memory_folder,
    with_given,
)
from tutti.elastic.journal import FOLDER, Entry, Journal, last_generation, read_journal
from tutti.elastic.membership import OVER, Membership
from tutti.elastic.messages import control_key
from tutti.elastic.restore import is_over
from tutti.elastic.store import LostLeadError
from tutti.errors import InputError, StoppedError, TuttiError
from tutti.files import write_text
from tutti.launch.identity import used_chips
from tutti.launch.secret import SECRET, SECRET_FILE, find_secret, new_secret
from tutti.train.elastic.copy_price import copy_price
from tutti.train.elastic.leader import Door, Identity, Leader, Listener
from tutti.train.elastic.places import chips_here, chips_of_node
from tutti.train.elastic.shared_store import SharedStore
from tutti.train.run.planning import Job
from tutti.train.run.starting import Resume

_LOOK_S = 0.05


class ElasticRun:
    """A job that goes on when ranks are lost."""

    def __init__(
        self,
        job: Job,
        *,
        resume: Resume,
        listener: Listener | None,
        environment: Mapping[int, Mapping[str, str]] | None = None,
    ) -> None:
        assert job.config.elastic is not None
        self.job, self.config = job, job.config.elastic
        self.asked_by, self._asked = 0, 0
        folder = job.config.folder
        earlier = _earlier(folder) if resume is not False else []
        self._host, port = ("127.0.0.1", "*")
        if self.config.listen:
            self._host, number = address_of(self.config.listen, "elastic.listen")
            port = str(number)
        self._identity = _identity(folder, again=bool(earlier))
        generation = last_generation(folder)
        self._shared: SharedStore | None = None
        if self.config.store:
            shared = SharedStore(self.config.store, self._own_node(), f"{self._host}:{port}")
            earlier = shared.begin(self._identity.name, again=bool(earlier), log=earlier)
            generation = max(generation, shared.store.generation())
            self._shared = shared
        journal = self._shared.journal(folder) if self._shared is not None else Journal(folder)
        door = Door(
            host=self._host, port=port, own_node=self._own_node(), admits=bool(self.config.listen)
        )
        self._leader = Leader(
            job, journal, self._identity, door,
            resume=resume, earlier=earlier, generation=generation, listener=listener,
        )  # fmt: skip
        _write_identity(folder, self._identity)  # this host leads: the folder is of its job
        self._leader.ended_by_listener = self._ended_by_listener
        self._memory = memory_folder(self._identity.name, self._own_host())
        self.agent = Agent(self._agent_settings(environment or {}))
        self._leader.failed = lambda: self.agent.error
        if self._shared is not None:
            self._leader.controller.hold = self._shared.hold
            self._shared.while_waiting(self._while_waiting)

    def _own_node(self) -> str:
        """Return the node whose chips are here; empty where all are."""
        if not self.config.listen:
            return ""
        first = next(iter(used_chips(self.job.plan)))
        return self.config.node or f"{first.pool}/{first.node}"

    def _own_host(self) -> str:
        return self._own_node() or "here"

    def _agent_settings(self, environment: Mapping[int, Mapping[str, str]]) -> AgentSettings:
        used = {str(chip): rank for chip, rank in used_chips(self.job.plan).items()}
        node, secret = self._own_node(), self._identity.secret
        chips = chips_of_node(self.job, node) if node else chips_here(self.job)
        plain = chip_environment(chips, world=len(used), master=self._host, secret=secret)
        given = {chip: environment.get(used.get(chip, -1), {}) for chip in chips}
        return AgentSettings(
            job=self._identity.name,
            host=self._own_host(),
            chips=chips,
            controller=self._leader.controller.address,
            module=RANK_MODULE,
            folder=self.job.config.folder.resolve(),
            memory=self._memory,
            environment=with_given(plain, given),
            key=control_key(secret.encode()),
            heartbeat_s=self.config.heartbeat_s,
            partners=self.config.partners,
        )

    def run(self) -> dict[str, Any]:
        """Run to the end; return what it came to."""
        leader, members = self._leader, None
        if self.config.copies:
            leader.decided("copies", copy_price(self.job).words(self.config.copies))
        self.agent.start()
        try:
            try:
                members = leader.controller.run()
            except LostLeadError as error:
                leader.say(str(error))
                leader.close()
                assert self._shared is not None
                self._shared.close()  # a lead that was taken anew would have no controller
                self._follow()
        finally:
            self.agent.close()
            leader.close()
            if self._shared is not None:
                self._shared.close()
            if members is not None and members.phase in OVER:
                (self.job.config.folder / SECRET_IN_RUN).unlink(missing_ok=True)
            shutil.rmtree(self._memory, ignore_errors=True)
        return self._result(members)

    def _result(self, members: Membership | None) -> dict[str, Any]:
        self._look_for_end()
        if members is None:
            raise StoppedError(
                f"another host has led the job since; {self.agent.end or 'ended'} "
                f"(tutti job status {self.job.config.folder})",
                by=self.asked_by or signal.SIGTERM,
            )
        if members.phase is Phase.GIVEN_UP:
            logs = self.job.config.folder / "logs"
            raise TuttiError(f"given up: {members.why}; the logs are in {logs}")
        if self._leader.closed:
            saved = self._leader.summary or {}
            raise TuttiError(
                f"given up: {self._leader.closed}; checkpoint: {saved.get('checkpoint', 'none')}; "
                "`tutti train --resume` goes on from it"
            )
        if self._leader.summary is None:
            raise StoppedError(
                "the run was stopped before it had begun", by=self.asked_by or signal.SIGTERM
            )
        return {**self._leader.summary, **self._leader.figures.summary(self.job)}

    def _follow(self) -> None:
        """Be an agent of whoever leads, until it ends."""
        assert self._shared is not None
        follower = Follower(
            self._shared.store,
            Candidate(
                node=self._own_node(), folder=self.job.config.folder.resolve(),
                address=self._host, environment={**os.environ, SECRET: self._identity.secret},
            ),
            self.agent.follow,
        )  # fmt: skip
        try:
            while self.agent.is_running and not self.agent.end and not self._asked:
                follower.look()
                time.sleep(_LOOK_S)
        finally:
            follower.close()

    def _look_for_end(self) -> None:
        """Raise where the run was asked to end at once."""
        if self._asked > 1:
            raise StoppedError(
                "ended at once, as asked; what was not saved is lost", by=self.asked_by
            )

    def _while_waiting(self) -> None:
        """Raise what ends the run while its store is away, and nothing can be decided."""
        self._look_for_end()
        failed = self._leader.failed()
        if failed is not None:
            raise TuttiError(f"given up: the agent of this host failed: {failed}")

    def _ended_by_listener(self) -> None:
        if not self.asked_by:
            self.ask_to_stop()

    def ask_to_stop(self, by: int = signal.SIGTERM) -> None:
        """Let the ranks finish their step, save and end; asked twice, end now."""
        self._asked += 1
        self.asked_by = self.asked_by or by
        if self._asked == 1:
            self._leader.controller.finish(by)
        else:
            self._leader.controller.tell(Fatal("asked to end at once"))


def _earlier(folder: Path) -> list[Entry]:
    """Return the decisions of a run that was cut off with its controller."""
    try:
        entries = read_journal(folder)
    except InputError:
        return []
    return [] if is_over(entries) else entries


def _identity(folder: Path, *, again: bool) -> Identity:
    """Return the job's name and secret; those of before where agents wait for it."""
    if again and known_job(folder) and (folder / SECRET_IN_RUN).is_file():
        return known_identity(folder)
    given = os.environ.get(SECRET) or os.environ.get(SECRET_FILE)
    secret = find_secret(os.environ, 2).reveal().decode() if given else new_secret()
    return Identity(name=uuid.uuid4().hex[:12], secret=secret)


def known_identity(folder: Path) -> Identity:
    """Return the name and the secret of the job whose folder this is."""
    name, secret = known_job(folder), agent_secret(folder)
    if not name or secret is None:
        missing = SECRET_IN_RUN if name else JOB_FILE
        raise InputError(f"{folder}: no elastic run that goes on: it has no {missing}")
    return Identity(name=name, secret=secret.reveal().decode())


def _write_identity(folder: Path, identity: Identity) -> None:
    secret_file = folder / SECRET_IN_RUN
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    write_text(folder / JOB_FILE, f"{identity.name}\n")
    secret_file.unlink(missing_ok=True)
    descriptor = os.open(secret_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(identity.secret)
