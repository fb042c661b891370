"""Leader: what decides for an elastic job: the controller, with plans, figures, wishes, watches.

It knows no ranks of its own: agents join it, one of them perhaps in the same process.
"""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tutti.comm.entry.store import StoreServer
from tutti.comm.entry.trust import Key
from tutti.elastic.controller import Controller, ControllerSettings
from tutti.elastic.events import Drain, Event, Fatal, Phase
from tutti.elastic.join import own_address, zmq_address
from tutti.elastic.journal import Entry, Journal, now
from tutti.elastic.membership import Membership
from tutti.elastic.messages import Hello, Welcome, control_key
from tutti.elastic.operator_requests import OperatorRequests
from tutti.elastic.restore import restored
from tutti.errors import InputError
from tutti.launch.identity import used_chips
from tutti.launch.secret import Secret
from tutti.observe import slow_series
from tutti.observe.folder import PLAN_FILE, SERIES
from tutti.observe.slow_series import SlowSeries
from tutti.plan.files import load_plan, plan_hash
from tutti.ranks.local_processes import RankEvent
from tutti.train.elastic.adapt import Adapter, in_words
from tutti.train.elastic.figures import Figures
from tutti.train.elastic.hang_watch import HangWatch
from tutti.train.elastic.next_generation import Settler
from tutti.train.elastic.places import chips_of_node, many_hosts_s, nodes_of
from tutti.train.elastic.slow_watch import SlowWatch, WireWatch
from tutti.train.run.planning import Job
from tutti.train.run.starting import Resume

Listener = Callable[[RankEvent], object]  # True: the run shall end


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What tells this job from others, and its secret."""

    name: str
    secret: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """Where agents join."""

    host: str
    port: str  # "*": any
    own_node: str = ""  # whose agent is in this process
    admits: bool = True


class Leader:
    """The one that decides."""

    def __init__(
        self,
        job: Job,
        journal: Journal,
        identity: Identity,
        door: Door,
        *,
        resume: Resume,
        earlier: Sequence[Entry] = (),
        generation: int = 0,
        listener: Listener | None = None,
    ) -> None:
        """Bind; `earlier` are the decisions of a job whose controller was lost."""
        assert job.config.elastic is not None
        self.job, self.config = job, job.config.elastic
        self._journal, self._identity, self._door = journal, identity, door
        self._listener = listener
        self._servers: list[StoreServer] = []
        self.figures = Figures(job, self.say)
        self.summary: dict[str, Any] | None = None
        self.closed = ""  # why what is left only saved
        self.failed: Callable[[], BaseException | None] = lambda: None  # what ends all
        self.ended_by_listener: Callable[[], None] = lambda: None
        self._settler = Settler(job, resume=resume)
        self.controller = self._controller(generation)
        if earlier:
            self._go_on(earlier)
        self._slow, self._wires = SlowWatch(job), WireWatch(job)
        self._hangs = HangWatch(
            job, self.controller, lambda: self._settler.current, self.config.hang_after_s
        )
        self._adapter = Adapter(job, self._settler, self.decided)
        path = job.config.folder / SERIES / slow_series.FILE
        self._slow_series = SlowSeries(path, say=self.say)
        self._wishes = OperatorRequests(job.config.folder)
        self.controller.watch = self._watch

    def close(self) -> None:
        """Let go of sockets and files."""
        self._adapter.close()
        self.controller.close()
        self._slow_series.close()  # before the last look for alerts
        self.figures.close()
        for server in self._servers:
            server.close()
        self._journal.close()

    def _controller(self, generation: int) -> Controller:
        settings = ControllerSettings(
            job=self._identity.name,
            key=control_key(self._identity.secret.encode()),
            bind=zmq_address(own_address(self._door.host), self._door.port),
            death_after_s=self.config.death_after_s,
            wait_s=self.config.wait_s,
        )
        try:
            made = Controller(
                settings, self._journal, self._settler, self._rendezvous, self._passed,
                generation=generation,
            )  # fmt: skip
        except OSError as error:
            raise InputError(
                f"elastic.listen is '{self.config.listen}': {error.strerror or error}; give an "
                "address of this host and a free port"
            ) from None
        if self._door.admits:
            made.admit = self._admit
        return made

    def _go_on(self, earlier: Sequence[Entry]) -> None:
        """Take up a job whose controller was lost, with the agents that wait for it."""
        members = restored(self._identity.name, earlier)
        if members is not None:
            self._settler.restore(earlier)
            self.controller.restore(members)

    def _admit(self, hello: Hello) -> Welcome | str:
        chips = chips_of_node(self.job, hello.node)
        if not chips:
            known = ", ".join(nodes_of(self.job))
            return f"cluster '{self.job.cluster.name}' has no such node (it has {known})"
        if hello.node == self._door.own_node:
            return "the controller is on that node itself"
        before = self.controller.members.host(hello.node)
        return Welcome(
            job=self._identity.name,
            folder=str(self.job.config.folder.resolve()),
            chips=chips,
            world=len(used_chips(self.job.plan)),
            plan_hash=self._plan_hash,
            heartbeat_s=max(self.config.heartbeat_s, many_hosts_s(self.job)),
            wait_s=self.config.wait_s,
            partners=self.config.partners,
            incarnation=before.status.incarnation if before is not None else 0,
        )

    @functools.cached_property
    def _plan_hash(self) -> str:
        """Of the plan as it is read from the run's folder, as agents read it."""
        return plan_hash(load_plan(self.job.config.folder / PLAN_FILE))

    def _watch(self, members: Membership) -> Event | None:
        self._hangs(members)
        failed = self.failed()
        if failed is not None:
            return Fatal(f"the agent of this host failed: {failed}")
        if self._settler.closing and members.phase is Phase.RUNNING and not self.closed:
            self.closed = self._settler.closing
            self.decided("saves", f"{self.closed}: what is left saves, and the job is given up")
            self.controller.finish(signal.SIGTERM)
        for asked in self._wishes.take():
            if asked.kind == "replan":
                self._adapter.ask()
            elif asked.kind == "add":
                self.decided("add", f"{asked.place}, as somebody asked")
                self._settler.forgive(asked.place)
                self._adapter.forgive(asked.place)
                self.controller.tell(Drain(asked.place, back=True))
            elif self._settler.can_do_without(asked.place, members.chips()):
                self.decided("drain", f"{asked.place}, as somebody asked")
                self.controller.tell(Drain(asked.place))
            else:
                self.decided("stays", f"without {asked.place} the model does not run: it is kept")
        return self._adapter.look(members)

    def decided(self, phase: str, text: str) -> None:
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
        self.say(f"{phase}: {text}")

    def say(self, text: str) -> None:
        """Say something that is no decision."""
        if self._listener is not None:
            self._listener(RankEvent(0, "notice", {"text": text}))

    # --- what the controller needs -------------------------------------------------------------

    def _rendezvous(self, generation: int, size: int) -> str:
        key = Key(Secret(self._identity.secret.encode()), "store", f"generation-{generation}")
        server = StoreServer(key, size, self._door.host)
        self._servers.append(server)
        for old in self._servers[:-2]:
            old.close()
        del self._servers[:-2]
        return f"{self._door.host}:{server.port}"

    def _took(self, values: dict[str, Any]) -> None:
        """Look at what a step took every rank and wire; say what became slow, or well."""
        members, adapter, step = self.controller.members, self._adapter, int(values["step"])
        chips = self._slow.step(
            members, self._settler.current, adapter.slow, step, values["compute_s"]
        )
        wires = self._wires.step(
            members, adapter.slow_wires, step, float(values["step_s"]), values["wires"]
        )
        for verdict in chips:
            chip = members.seats[verdict.rank].chip
            text = f"rank {verdict.rank} ({chip}) {verdict.why}"
            self.decided("slow" if verdict.slow else "well again", text)
            adapter.became(chip, verdict.factor)
        for told in wires:
            self.decided("slow" if told.slow else "well again", f"{in_words(told.ends)} {told.why}")
            adapter.wire_became(told.ends, told.factor)
        self._slow_series.write(adapter.slow, adapter.slow_wires)

    def _passed(self, rank: int, chip: str, kind: str, values: dict[str, Any]) -> None:
        if kind == "done":
            self.summary = values
        if kind == "died":
            self._settler.died(chip)
        if kind == "times":
            self._took(values)
            return
        if kind == "step":
            if not self.figures.take(values):
                return
            self._adapter.took(int(values["step"]), float(values["seconds"]))
        if kind == "validation":
            self.figures.validation(int(values["step"]), float(values["loss"]))
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
        elif self._listener(RankEvent(rank, kind, values)) is True:
            self.ended_by_listener()
