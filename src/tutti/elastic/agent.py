"""Agent: the processes of one host, and its word to the controller.

It gives `AgentState` processes, pipes and a line to the controller: ranks come from a fork server,
their deaths are noticed by pidfd, their pulses are read, and a status goes to the controller
whenever something changed and with every heartbeat.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import zmq

from tutti.elastic.agent_settings import AgentSettings
from tutti.elastic.agent_state import (
    AgentState,
    Command,
    Died,
    End,
    Enter,
    Free,
    Leave,
    Said,
    Start,
)
from tutti.elastic.controller_link import ControllerLink
from tutti.elastic.fork_server import ForkServer
from tutti.elastic.messages import (
    Death,
    Order,
    Pulses,
    Refusal,
    Report,
    Request,
    Standing,
)
from tutti.elastic.partner_copies import Kept, PartnerCopies, kept_copies
from tutti.elastic.rank_processes import (
    RankProcess,
    copy_steps,
    end_processes,
    how_ended,
    still_pulses,
)
from tutti.elastic.stalled_ranks_file import StillFile
from tutti.errors import InputError
from tutti.observe.pulse import Reading

STATUS_WAIT_S = 0.3  # for the fork server to say how a process ended
STACK_S = 0.05  # for a stack to be written
KILL_AFTER_S = 10.0  # a process that was told to leave and does not
QUIET_S = 1.0  # of all ranks of a host, until the controller is told what they do
TELL_S = 0.25  # between two tellings
_IN_GENERATION = (Standing.ENTERING, Standing.RUNNING)


class Agent:
    """One host's agent, in a thread of its own."""

    def __init__(self, settings: AgentSettings) -> None:
        self.settings = settings
        self.state = AgentState.of(
            settings.job, settings.host, settings.chips,
            incarnation=max(time.time_ns(), settings.incarnation + 1),
        )  # fmt: skip
        self._ranks: dict[str, RankProcess] = {}
        self._numbers: dict[int, RankProcess] = {}
        self._calls: list[Callable[[], None]] = []
        self._ears, self._bell = os.pipe()
        self._over = threading.Event()
        self._tell_at = self._due = 0.0
        self._thread = threading.Thread(target=self._run, name="tutti-agent", daemon=True)
        self._partner_copies: PartnerCopies | None = None
        self._still = StillFile(settings.folder, settings.host)
        self.error: BaseException | None = None

    def start(self) -> None:
        """Start the ranks' processes and talk to the controller."""
        self._thread.start()

    def call(self, function: Callable[[], None]) -> None:
        """Run something in the agent's thread."""
        self._calls.append(function)
        os.write(self._bell, b"!")

    def drain(self) -> None:
        """Ask that this host be left; it ends when the others go on without it."""

        def ask() -> None:
            self.state = self.state.drained()
            self._report()

        self.call(ask)

    def follow(self, address: str) -> None:
        """Talk to the controller at another address."""

        def change() -> None:
            self._link.follow(address)
            self._report()

        self.call(change)

    @property
    def is_running(self) -> bool:
        """Whether it serves."""
        return self._thread.is_alive()

    @property
    def end(self) -> str | None:
        """Why the controller let it go; None while it has not."""
        order = self.state.order
        return order.why if order is not None and order.kind == "stop" else None

    def _requested(self, request: Request) -> None:
        if request.kind == "finish":
            for rank in self._ranks.values():
                self._tell(rank, {"stop": request.signal})
            return
        child = self._ranks.get(request.chip)
        if child is None or child.process != request.process or not child.pid or child.words:
            return
        child.words = request.why
        with contextlib.suppress(ProcessLookupError):
            # its stack goes to its log first, if it can be had
            os.kill(child.pid, signal.SIGUSR2)
            time.sleep(STACK_S)
            os.kill(child.pid, signal.SIGKILL)

    def pulses(self) -> dict[str, Reading]:
        """Return what every rank of this host is doing."""
        readings: dict[str, Reading] = {}
        for chip, rank in list(self._ranks.items()):
            reading = rank.reading(self._pulse_path(chip, rank.process))
            if reading is not None:
                readings[chip] = reading
        return readings

    def close(self) -> None:
        """End all processes and the thread."""
        self._over.set()
        with contextlib.suppress(OSError):
            os.write(self._bell, b"!")
        if self._thread.is_alive():
            self._thread.join(15)

    # --- the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            self.error = error
            raise

    def _serve(self) -> None:
        settings = self.settings
        (settings.folder / "logs").mkdir(parents=True, exist_ok=True)
        settings.memory.mkdir(parents=True, exist_ok=True)
        log = settings.folder / "logs" / f"fork-server-{settings.host.replace('/', '-')}.log"
        self._server = ForkServer(settings.module, settings.folder, log=log)
        self._link = ControllerLink(
            settings.controller, settings.key, settings.job, settings.host, self.state.incarnation
        )
        if settings.partners:
            self._partner_copies = PartnerCopies.of(settings, self._keeps)
            kept = kept_copies(settings.memory)
            self.state = replace(self.state, copy_address=self._partner_copies.address, kept=kept)
        try:
            for report in self.state.reports:
                self._start(report.chip, report.process)
                self._look_for_copies(report.chip)  # of an agent that was here before
            self._report()
            while not self._over.is_set():
                self._turn()
        finally:
            for rank in self._ranks.values():
                self._tell(rank, {"end": True})
            end_processes(list(self._ranks.values()))
            if self._partner_copies is not None:
                self._partner_copies.close()
            self._server.close()
            self._link.close()

    def _keeps(self, kept: Kept) -> None:
        def take() -> None:
            self.state = self.state.keeping(kept)
            self._report()

        self.call(take)

    def _turn(self) -> None:
        poller = zmq.Poller()
        poller.register(self._link.socket, zmq.POLLIN)
        for descriptor in (self._ears, self._server.socket.fileno()):
            poller.register(descriptor, zmq.POLLIN)
        for rank in self._ranks.values():
            for descriptor in (rank.events, rank.pidfd):
                if descriptor >= 0:
                    poller.register(descriptor, zmq.POLLIN)
        wait_s = max(0.0, self._due - time.monotonic())
        ready = {entry for entry, _ in poller.poll(int(min(wait_s, 0.1) * 1000))}
        if self._ears in ready:
            os.read(self._ears, 4096)
        while self._calls:
            self._calls.pop(0)()
        for asked in self._link.messages():
            self._message(asked)
        for message in self._server.messages():
            self._forked(message)
        for rank in list(self._ranks.values()):
            if rank.events in ready:
                self._read(rank)
            if rank.pidfd in ready and not rank.ended_at:
                rank.ended_at = time.monotonic()
            self._look(rank)
        now = time.monotonic()
        if now >= self._due:
            self.state = self.state.refreshed()
            self._report()
            self._link.again()
        if now >= self._tell_at:
            self._tell_at = now + TELL_S
            self._tell_pulses()
        if now - self._link.heard_at > self.settings.wait_s:
            raise InputError(
                f"nothing was heard of the controller at {self.settings.controller} for "
                f"{self.settings.wait_s:g} s (elastic.wait_s)"
            )

    def _message(self, message: Order | Request | Refusal) -> None:
        if isinstance(message, Refusal):
            raise InputError(f"refused: {message.why}")
        if isinstance(message, Request):
            self._requested(message)
        else:
            if self._partner_copies is not None:
                self._partner_copies.follow(message)
            self._after(message)

    def _report(self) -> None:
        self._due = time.monotonic() + self.settings.heartbeat_s
        self._link.status(self.state.status())

    def _hear(self, rank: RankProcess, values: dict[str, Any]) -> None:
        self._link.words(rank.chip, rank.process, values)

    def _tell_pulses(self) -> None:
        """Say what the ranks do, if none of them has moved for a while."""
        active = {r.chip for r in self.state.reports if r.standing in _IN_GENERATION}
        readings = {chip: still for chip, still in self.pulses().items() if chip in active}
        still, own = still_pulses(readings, QUIET_S), self.settings
        self._still.take(still, self.state.order)
        if still:
            self._link.pulses(Pulses(job=own.job, host=own.host, pulses=still))

    def _after(self, event: Order | Said | Died) -> None:
        before = self.state
        self.state, commands = before.after(event)
        for command in commands:
            self._obey(command)
        if self.state is not before:
            self._report()

    def _obey(self, command: Command) -> None:
        match command:
            case Start(chip, process):
                self._start(chip, process)
            case Enter(chip, seat, order):
                self._tell(self._ranks[chip], {
                    "enter": msgspec.to_builtins(order), "rank": seat.rank,
                })  # fmt: skip
            case Leave(chip, generation, why, gentle):
                rank = self._ranks[chip]
                rank.told_at = 0.0 if gentle else time.monotonic()
                self._tell(rank, {"leave": generation, "why": why, "gentle": gentle})
            case Free(chip):
                self._tell(self._ranks[chip], {"free": True})
            case End():
                for rank in self._ranks.values():
                    self._tell(rank, {"end": True})

    # --- processes ---------------------------------------------------------------------------

    def _pulse_path(self, chip: str, process: int) -> Path:
        return self.settings.memory / f"pulse-{chip.replace('/', '-')}-{process}"

    def _start(self, chip: str, process: int) -> None:
        settings = self.settings
        events, their_events = os.pipe()
        their_commands, commands = os.pipe()
        os.set_blocking(events, False)
        log = settings.folder / "logs" / f"{chip.replace('/', '-')}.{process}.log"
        old = self._ranks.pop(chip, None)
        if old is not None:
            old.close()
        rank = RankProcess(chip=chip, process=process, events=events, commands=commands, log=log)
        self._ranks[chip] = rank
        number = len(self._numbers)
        self._numbers[number] = rank
        environment = {
            **settings.environment.get(chip, {}),
            "TUTTI_CHIP": chip,
            "TUTTI_PROCESS": str(process),
            "TUTTI_PULSE": str(self._pulse_path(chip, process)),
            "TUTTI_RUN": str(settings.folder),
            "TUTTI_MEMORY": str(settings.memory),
        }
        self._server.fork(number, environment, log, (their_events, their_commands))
        os.close(their_events)
        os.close(their_commands)

    def _forked(self, message: dict[str, Any]) -> None:
        if "number" in message:
            rank = self._numbers[message["number"]]
            rank.pid = message["pid"]
            with contextlib.suppress(OSError):
                rank.pidfd = os.pidfd_open(rank.pid)
            if rank.pidfd < 0:  # it has ended already
                rank.ended_at = time.monotonic()
            return
        for rank in self._ranks.values():
            if rank.pid == message["pid"]:
                rank.status = message["status"]
                rank.ended_at = rank.ended_at or time.monotonic()

    def _look(self, rank: RankProcess) -> None:
        now = time.monotonic()
        if rank.ended_at and (rank.status is not None or now > rank.ended_at + STATUS_WAIT_S):
            self._read(rank)
            self._died(rank)
        elif rank.told_at and now > rank.told_at + KILL_AFTER_S and rank.pid:
            rank.told_at = 0.0
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGKILL)

    def _died(self, rank: RankProcess) -> None:
        over = self.state.order is not None and self.state.order.kind == "stop"
        if self._ranks.get(rank.chip) is not rank or rank.ended_at == float("inf"):
            return
        reading = self.pulses().get(rank.chip)
        death = Death(
            process=rank.process,
            how=rank.words or how_ended(rank.status),
            generation=0 if reading is None else reading.generation,
            step=0 if reading is None else reading.step,
            instruction=-1 if reading is None else reading.instruction,
        )
        rank.ended_at = float("inf")  # once
        if not over:
            self._hear(rank, {"kind": "died", "how": death.how})
        self._look_for_copies(rank.chip)  # what it copied last it had no time to say
        self._after(Died(rank.chip, death))

    def _look_for_copies(self, chip: str) -> None:
        known, steps = self.state.report(chip), copy_steps(self.settings.memory, chip)
        if known.copy_steps != steps:
            self._after(Said(msgspec.structs.replace(known, copy_steps=steps)))

    def _read(self, rank: RankProcess) -> None:
        try:
            data = os.read(rank.events, 1 << 20)
        except (BlockingIOError, OSError):
            return
        if not data:
            os.close(rank.events)
            rank.events = -1
            return
        *lines, rank.unread = (rank.unread + data).split(b"\n")
        for line in lines:
            self._said(rank, json.loads(line))

    def _said(self, rank: RankProcess, values: dict[str, Any]) -> None:
        if values["kind"] == "standing":
            values.pop("kind")
            if values["standing"] == Standing.IDLE:
                rank.told_at = 0.0
            report = msgspec.convert(
                {"chip": rank.chip, "process": rank.process, **values}, Report, strict=False
            )
            self._after(Said(report))
            return
        if values["kind"] == "error":
            rank.words = f"failed: {values['text']}"
            return  # told when it has ended
        self._hear(rank, values)

    def _tell(self, rank: RankProcess, value: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            os.write(rank.commands, json.dumps(value).encode() + b"\n")
