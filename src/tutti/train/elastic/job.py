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
from tutti.errors import InputError, StoppedError, TuttiError, hint
from tutti.files import write_text
from tutti.launch.identity import used_chips
from tutti.launch.secret import SECRET, SECRET_FILE, Secret, find_secret, new_secret
from tutti.observe.folder import METRICS
from tutti.ranks.local_processes import RankEvent
from tutti.train.elastic.adapt import Adapter
from tutti.train.elastic.figures import Figures
from tutti.train.elastic.settle import Settler
from tutti.train.elastic.watches import HangWatch, SlowWatch
from tutti.train.run.planning import Job
from tutti.train.run.starting import Resume

JOB_FILE = f"{FOLDER}/job"
HEARTBEAT_S_PER_HOST = 0.25 / 512  # so that listening to many takes a small part of a core
Listener = Callable[[RankEvent], None]


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
            heartbeat_s=max(
                self.config.heartbeat_s, HEARTBEAT_S_PER_HOST * len(nodes_of(self.job))
            ),
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
            else:
                back = asked.kind == "add"
                self._decided(asked.kind, f"{asked.place}, as somebody asked")
                if back:
                    self._settler.forgive(asked.place)
                    self._adapter.forgive(asked.place)
                self.controller.tell(Drain(asked.place, back=back))
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
        else:
            self._listener(RankEvent(rank, kind, values))


# --- where the chips are -----------------------------------------------------------------------


def nodes_of(job: Job) -> list[str]:
    """Return the nodes of a job's cluster."""
    return [f"{pool.name}/{node}" for pool in job.cluster.pools for node in range(pool.nodes)]


def many_hosts_s(job: Job) -> float:
    """Return the least time between two heartbeats of a host, given how many there are."""
    return HEARTBEAT_S_PER_HOST * len(nodes_of(job))


def chips_of_node(job: Job, node: str) -> tuple[str, ...]:
    """Return the chips of a node; none where there is no such node."""
    if node not in nodes_of(job):
        return ()
    pool = job.cluster.pool(node.split("/")[0])
    return tuple(f"{node}/{slot}" for slot in range(pool.node.num_chips))


def chips_here(job: Job) -> tuple[str, ...]:
    """Return the chips of a job that runs on one machine: all of the nodes that its plan uses."""
    used = [f"{chip.pool}/{chip.node}" for chip in used_chips(job.plan)]
    return tuple(chip for node in dict.fromkeys(used) for chip in chips_of_node(job, node))


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


def check_elastic(job: Job) -> None:
    """Refuse what cannot go on: more chips than the cluster has, figures that no rank writes."""
    elastic = job.config.elastic
    assert elastic is not None
    most = sum(pool.num_chips for pool in job.cluster.pools)
    if elastic.min_chips > most:
        raise InputError(
            f"elastic.min_chips is {elastic.min_chips}, but cluster '{job.cluster.name}' has "
            f"{most} chips"
        )
    if elastic.node and not elastic.listen:
        raise InputError(
            "elastic.node is given, but not elastic.listen: without it all chips are here"
        )
    if elastic.node and elastic.node not in nodes_of(job):
        raise InputError(f"elastic.node is '{elastic.node}'; {hint(elastic.node, nodes_of(job))}")
    least_s = 2 * many_hosts_s(job)
    if elastic.listen and elastic.death_after_s < least_s:
        raise InputError(
            f"elastic.death_after_s is {elastic.death_after_s:g}, but heartbeats of "
            f"{len(nodes_of(job))} hosts come every {least_s / 2:.2g} s; give it {least_s:.2g} at "
            "least"
        )
    measure = job.config.measure
    for name in ("tensorboard", "prometheus_port", "wandb", "mlflow", "tensors"):
        if getattr(measure, name):
            raise InputError(
                f"measure.{name}: not written by elastic runs yet, whose figures the controller "
                f"writes to {METRICS}; leave it out"
            )
