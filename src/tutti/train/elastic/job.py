"""`tutti train` of a file with `elastic:`: controller and first agent in one.

Without `elastic.listen` all chips of the plan are this machine's; with it, those of one node are,
and agents on other hosts bring theirs.
"""

from __future__ import annotations

import os
import shutil
import signal
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tutti.comm.entry.store import StoreServer
from tutti.comm.entry.trust import Key
from tutti.elastic.agent import Agent
from tutti.elastic.agent_settings import AgentSettings
from tutti.elastic.controller import Controller, ControllerSettings
from tutti.elastic.events import Drain, Event, Fatal, Phase
from tutti.elastic.join import (
    RANK_MODULE,
    SECRET_IN_RUN,
    address_of,
    chip_environment,
    memory_folder,
    own_address,
    with_given,
    zmq_address,
)
from tutti.elastic.journal import FOLDER, Entry, Journal, last_generation, now, read_journal
from tutti.elastic.membership import Membership
from tutti.elastic.messages import Hello, Welcome, control_key
from tutti.elastic.restore import is_over, restored
from tutti.elastic.wishes import Wishes
from tutti.errors import InputError, StoppedError, TuttiError
from tutti.files import write_text
from tutti.launch.identity import used_chips
from tutti.launch.secret import SECRET, SECRET_FILE, Secret, find_secret, new_secret
from tutti.ranks.local_processes import RankEvent
from tutti.train.elastic.adapt import Adapter
from tutti.train.elastic.copy_price import copy_price
from tutti.train.elastic.figures import Figures
from tutti.train.elastic.places import chips_here, chips_of_node, many_hosts_s, nodes_of
from tutti.train.elastic.settle import Settler
from tutti.train.elastic.watches import HangWatch, SlowWatch
from tutti.train.run.planning import Job
from tutti.train.run.starting import Resume

JOB_FILE = f"{FOLDER}/job"
Listener = Callable[[RankEvent], object]


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
        self._listener = listener
        self._servers: list[StoreServer] = []
        self._figures = Figures(job)
        self.asked_by, self._asked = 0, 0
        self.summary: dict[str, Any] | None = None
        folder = job.config.folder
        earlier = _earlier(folder) if resume is not False else []
        self._journal = Journal(folder)
        self.name, self._secret = _identity(folder, again=bool(earlier))
        self._key = control_key(self._secret.encode())
        self._host, port = ("127.0.0.1", "*")
        if self.config.listen:
            self._host, number = address_of(self.config.listen, "elastic.listen")
            port = str(number)
        self._settler = Settler(job, resume=resume)
        self.controller = self._controller(port)
        if earlier:
            self._go_on(earlier)
        self._memory = memory_folder(self.name, self._own_host())
        self.agent = Agent(self._agent_settings(environment or {}))
        self._slow = SlowWatch(job)
        self._hangs = HangWatch(
            job, self.controller, lambda: self._settler.current, self.config.hang_after_s
        )
        self._adapter = Adapter(job, self._settler, self._decided)
        self._wishes = Wishes(folder)
        self.controller.watch = self._watch

    def _controller(self, port: str) -> Controller:
        settings = ControllerSettings(
            job=self.name, key=self._key, bind=zmq_address(own_address(self._host), port),
            death_after_s=self.config.death_after_s, wait_s=self.config.wait_s,
        )  # fmt: skip
        try:
            made = Controller(
                settings, self._journal, self._settler, self._rendezvous, self._passed,
                generation=last_generation(self.job.config.folder),
            )  # fmt: skip
        except OSError as error:
            raise InputError(
                f"elastic.listen is '{self.config.listen}': {error.strerror or error}; give an "
                "address of this host and a free port"
            ) from None
        if self.config.listen:
            made.admit = self._admit
        return made

    def _go_on(self, earlier: list[Entry]) -> None:
        """Take up a job whose controller was lost, with the agents that wait for it."""
        members = restored(self.name, earlier)
        if members is not None:
            self._settler.restore(earlier)
            self.controller.restore(members)

    def _admit(self, hello: Hello) -> Welcome | str:
        chips = chips_of_node(self.job, hello.node)
        if not chips:
            known = ", ".join(nodes_of(self.job))
            return f"cluster '{self.job.cluster.name}' has no such node (it has {known})"
        if hello.node == self._own_node():
            return "the controller is on that node itself"
        return Welcome(
            job=self.name,
            folder=str(self.job.config.folder.resolve()),
            chips=chips,
            world=len(used_chips(self.job.plan)),
            heartbeat_s=max(self.config.heartbeat_s, many_hosts_s(self.job)),
            wait_s=self.config.wait_s,
            partners=self.config.partners,
        )

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
        node = self._own_node()
        chips = chips_of_node(self.job, node) if node else chips_here(self.job)
        plain = chip_environment(chips, world=len(used), master=self._host, secret=self._secret)
        given = {chip: environment.get(used.get(chip, -1), {}) for chip in chips}
        return AgentSettings(
            job=self.name,
            host=self._own_host(),
            chips=chips,
            controller=self.controller.address,
            module=RANK_MODULE,
            folder=self.job.config.folder.resolve(),
            memory=self._memory,
            environment=with_given(plain, given),
            key=self._key,
            heartbeat_s=self.config.heartbeat_s,
            partners=self.config.partners,
        )

    def run(self) -> dict[str, Any]:
        """Run to the end; return what it came to."""
        if self.config.copies:
            self._decided("copies", copy_price(self.job).words(self.config.copies))
        self.agent.start()
        try:
            members = self.controller.run()
        finally:
            self._adapter.close()
            self.agent.close()
            self.controller.close()
            (self.job.config.folder / SECRET_IN_RUN).unlink(missing_ok=True)
            self._figures.close()
            for server in self._servers:
                server.close()
            self._journal.close()
            shutil.rmtree(self._memory, ignore_errors=True)
        if self._asked > 1:
            raise StoppedError(
                "ended at once, as asked; what was not saved is lost", by=self.asked_by
            )
        if members.phase is Phase.GIVEN_UP:
            raise TuttiError(f"given up: {members.why}; the logs are in {self._logs()}")
        if self.summary is None:
            raise StoppedError(
                "the run was stopped before it had begun", by=self.asked_by or signal.SIGTERM
            )
        return {**self.summary, **self._figures.summary(self.job)}

    def _watch(self, members: Membership) -> Event | None:
        self._hangs(members)
        if self.agent.error is not None:
            return Fatal(f"the agent of this host failed: {self.agent.error}")
        for asked in self._wishes.take():
            if asked.kind == "replan":
                self._adapter.ask()
            elif asked.kind == "add":
                self._decided("add", f"{asked.place}, as somebody asked")
                self._settler.forgive(asked.place)
                self._adapter.forgive(asked.place)
                self.controller.tell(Drain(asked.place, back=True))
            elif self._settler.can_do_without(asked.place, members.chips()):
                self._decided("drain", f"{asked.place}, as somebody asked")
                self.controller.tell(Drain(asked.place))
            else:
                self._decided("stays", f"without {asked.place} the model does not run: it is kept")
        return self._adapter.look(members)

    def _decided(self, phase: str, text: str) -> None:
        """Write a decision, and say it."""
        members = self.controller.members
        self._journal.write(
            Entry(
                at=now(),
                generation=members.generation,
                phase=phase,
                why=text,
                step=self._adapter.step,
                order=members.order,
            )
        )
        if self._listener is not None:
            self._listener(RankEvent(0, "notice", {"text": f"{phase}: {text}"}))

    def _logs(self) -> Path:
        return self.job.config.folder / "logs"

    def ask_to_stop(self, by: int = signal.SIGTERM) -> None:
        """Let the ranks finish their step, save and end; asked twice, end now."""
        self._asked += 1
        self.asked_by = self.asked_by or by
        if self._asked == 1:
            self.controller.finish(by)
        else:
            self.controller.tell(Fatal("asked to end at once"))

    # --- what the controller needs -------------------------------------------------------------

    def _rendezvous(self, generation: int, size: int) -> str:
        key = Key(Secret(self._secret.encode()), "store", f"generation-{generation}")
        server = StoreServer(key, size, self._host)
        self._servers.append(server)
        for old in self._servers[:-2]:
            old.close()
        del self._servers[:-2]
        return f"{self._host}:{server.port}"

    def _took(self, values: dict[str, Any]) -> None:
        """Look at what every rank computed in a step; say which chip became slow, or well."""
        members = self.controller.members
        found = self._slow.step(
            members, self._settler.current, self._adapter.slow, int(values["step"]),
            values["compute_s"],
        )  # fmt: skip
        for verdict in found:
            chip = members.seats[verdict.rank].chip
            text = f"rank {verdict.rank} ({chip}) {verdict.why}"
            self._decided("slow" if verdict.slow else "well again", text)
            if verdict.slow:
                self._adapter.slow[chip] = verdict.factor
            else:
                self._adapter.slow.pop(chip, None)

    def _passed(self, rank: int, chip: str, kind: str, values: dict[str, Any]) -> None:
        if kind == "done":
            self.summary = values
        if kind == "died":
            self._settler.died(chip)
        if kind == "times":
            self._took(values)
            return
        if kind == "step":
            if not self._figures.take(values):
                return
            self._adapter.took(int(values["step"]), float(values["seconds"]))
        if kind == "validation":
            self._figures.validation(int(values["step"]), float(values["loss"]))
        if self._listener is None:
            return
        if kind == "generation":
            number, phase = values["generation"], values["phase"]
            text = f"generation {number}: {phase}" + (
                f" ({values['text']})" if values["text"] else ""
            )
            self._listener(RankEvent(0, "notice", {"text": text}))
        elif kind == "died":
            self._listener(RankEvent(rank, "warning", {"text": f"rank {rank} {values['how']}"}))
        elif self._listener(RankEvent(rank, kind, values)) is True and not self.asked_by:
            self.ask_to_stop()


def _earlier(folder: Path) -> list[Entry]:
    """Return the decisions of a run that was cut off with its controller."""
    try:
        entries = read_journal(folder)
    except InputError:
        return []
    return [] if is_over(entries) else entries


def _identity(folder: Path, *, again: bool) -> tuple[str, str]:
    """Return the job's name and secret; those of before where agents wait for it."""
    environ = dict(os.environ)
    name_file, secret_file = folder / JOB_FILE, folder / SECRET_IN_RUN
    known = again and name_file.is_file() and secret_file.is_file()
    name = name_file.read_text(encoding="ascii").strip() if known else uuid.uuid4().hex[:12]
    if environ.get(SECRET) or environ.get(SECRET_FILE):
        secret = find_secret(environ, 2).reveal().decode()
    elif known:
        secret = find_secret({SECRET_FILE: str(secret_file)}, 2).reveal().decode()
    else:
        secret = new_secret()
    write_text(name_file, f"{name}\n")
    secret_file.unlink(missing_ok=True)
    descriptor = os.open(secret_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(secret)
    return name, secret
