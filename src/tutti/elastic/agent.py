"""Agent: the processes of one host, and its word to the controller.

It gives `AgentState` processes, pipes and a socket: ranks come from a fork server, their deaths are
noticed by pidfd, their pulses are read, and a status goes to the controller whenever something
changed and with every heartbeat.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq

from tutti.elastic.agent_state import AgentState, Command, Died, End, Enter, Leave, Said, Start
from tutti.elastic.fork_server import ForkServer
from tutti.elastic.messages import Death, Order, Report, Standing, packed, unpacked
from tutti.errors import InputError
from tutti.observe.pulse import PulseReader, Reading

STATUS_WAIT_S = 0.3  # for the fork server to say how a process ended
STACK_S = 0.05  # for a stack to be written
KILL_AFTER_S = 10.0  # a process that was told to leave and does not


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """What an agent needs to know."""

    job: str
    host: str
    chips: tuple[str, ...]
    controller: str  # zmq's address of it
    module: str  # whose `main` a rank's process runs
    folder: Path  # of the run
    memory: Path  # a folder in memory, for pulses and copies
    environment: Mapping[str, Mapping[str, str]]  # of each chip's processes
    heartbeat_s: float = 0.25
    key: bytes = b""


@dataclass(slots=True)
class _Rank:
    """A process, as its agent has it."""

    chip: str
    process: int
    events: int  # the end to read from
    commands: int  # the end to write to
    log: Path
    pid: int = 0
    pidfd: int = -1
    unread: bytes = b""
    ended_at: float = 0.0
    status: int | None = None
    words: str = ""  # what it said was wrong
    told_at: float = 0.0  # to leave
    pulse: PulseReader | None = None
    waiting: list[dict[str, Any]] = field(default_factory=list)


Hear = Callable[[str, int, dict[str, Any]], None]  # chip, process, what it said


class Agent:
    """One host's agent, in a thread of its own."""

    def __init__(self, settings: AgentSettings, hear: Hear) -> None:
        self.settings, self._hear = settings, hear
        self.state = AgentState.of(
            settings.job, settings.host, settings.chips, incarnation=time.time_ns()
        )
        self._ranks: dict[str, _Rank] = {}
        self._numbers: dict[int, _Rank] = {}
        self._calls: list[Callable[[], None]] = []
        self._ears, self._bell = os.pipe()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tutti-agent", daemon=True)
        self.error: BaseException | None = None

    def start(self) -> None:
        """Start the ranks' processes and talk to the controller."""
        self._thread.start()

    def call(self, function: Callable[[], None]) -> None:
        """Run something in the agent's thread."""
        self._calls.append(function)
        os.write(self._bell, b"!")

    def ask_to_stop(self, number: int) -> None:
        """Let the ranks finish their step, save and end."""

        def ask() -> None:
            for rank in self._ranks.values():
                self._tell(rank, {"stop": number})

        self.call(ask)

    def kill(self, chip: str, process: int, why: str) -> None:
        """End a process that hangs; its stack goes to its log first, if it can be had."""

        def end() -> None:
            rank = self._ranks.get(chip)
            if rank is not None and rank.process == process and rank.pid:
                rank.words = why
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid, signal.SIGUSR2)
                    time.sleep(STACK_S)
                    os.kill(rank.pid, signal.SIGKILL)

        self.call(end)

    def pulses(self) -> dict[str, Reading]:
        """Return what every rank of this host is doing."""
        found: dict[str, Reading] = {}
        for chip, rank in list(self._ranks.items()):
            if rank.pulse is None:
                with contextlib.suppress(InputError):
                    reader = PulseReader(self._pulse_path(chip, rank.process))
                    rank.pulse = reader
            if rank.pulse is not None:
                found[chip] = rank.pulse.read()
        return found

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
        log = settings.folder / "logs" / "fork-server.log"
        self._server = ForkServer(settings.module, settings.folder, log=log)
        context = zmq.Context()
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.connect(settings.controller)
        try:
            for report in self.state.reports:
                self._start(report.chip, report.process)
            self._report()
            while not self._over.is_set():
                self._turn()
        finally:
            self._end_all()
            self._server.close()
            self._socket.close()
            context.term()

    def _turn(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
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
        while self._socket.poll(0):
            self._message(self._socket.recv())
        for message in self._server.messages():
            self._forked(message)
        for rank in list(self._ranks.values()):
            if rank.events in ready:
                self._read(rank)
            if rank.pidfd in ready and not rank.ended_at:
                rank.ended_at = time.monotonic()
            self._look(rank)
        if time.monotonic() >= self._due:
            self.state = self.state.refreshed()
            self._report()

    def _message(self, data: bytes) -> None:
        try:
            message = unpacked(data)
        except msgspec.DecodeError:
            return
        if isinstance(message, Order) and message.job == self.settings.job:
            self._after(message)

    def _report(self) -> None:
        self._due = time.monotonic() + self.settings.heartbeat_s
        self._socket.send(packed(self.state.status()))

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
            case Leave(chip, generation, why):
                rank = self._ranks[chip]
                rank.told_at = time.monotonic()
                self._tell(rank, {"leave": generation, "why": why})
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
            for descriptor in (old.events, old.commands, old.pidfd):
                if descriptor >= 0:
                    os.close(descriptor)
        rank = _Rank(chip=chip, process=process, events=events, commands=commands, log=log)
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

    def _look(self, rank: _Rank) -> None:
        now = time.monotonic()
        if rank.ended_at and (rank.status is not None or now > rank.ended_at + STATUS_WAIT_S):
            self._read(rank)
            self._died(rank)
        elif rank.told_at and now > rank.told_at + KILL_AFTER_S and rank.pid:
            rank.told_at = 0.0
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGKILL)

    def _died(self, rank: _Rank) -> None:
        over = self.state.order is not None and self.state.order.kind == "stop"
        if self._ranks.get(rank.chip) is not rank or rank.ended_at == float("inf"):
            return
        reading = self.pulses().get(rank.chip)
        death = Death(
            process=rank.process,
            how=rank.words or _how(rank.status),
            generation=0 if reading is None else reading.generation,
            step=0 if reading is None else reading.step,
            instruction=-1 if reading is None else reading.instruction,
        )
        rank.ended_at = float("inf")  # once
        if not over:
            self._hear(rank.chip, rank.process, {"kind": "died", "how": death.how})
        # what it copied last it had no time to say
        known = self.state.report(rank.chip)
        copies = _copy_steps(self.settings.memory, rank.chip)
        self._after(Said(msgspec.structs.replace(known, copy_steps=copies)))
        self._after(Died(rank.chip, death))

    def _read(self, rank: _Rank) -> None:
        try:
            found = os.read(rank.events, 1 << 20)
        except (BlockingIOError, OSError):
            return
        if not found:
            os.close(rank.events)
            rank.events = -1
            return
        *lines, rank.unread = (rank.unread + found).split(b"\n")
        for line in lines:
            self._said(rank, json.loads(line))

    def _said(self, rank: _Rank, values: dict[str, Any]) -> None:
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
        self._hear(rank.chip, rank.process, values)

    def _tell(self, rank: _Rank, value: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            os.write(rank.commands, json.dumps(value).encode() + b"\n")

    def _end_all(self) -> None:
        limit = time.monotonic() + 3.0
        for rank in self._ranks.values():
            self._tell(rank, {"end": True})
        while time.monotonic() < limit and any(
            r.pid and _alive(r.pid) for r in self._ranks.values()
        ):
            time.sleep(0.02)
        for rank in self._ranks.values():
            if rank.pid and _alive(rank.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid, signal.SIGKILL)
            for descriptor in (rank.events, rank.commands, rank.pidfd):
                if descriptor >= 0:
                    os.close(descriptor)


def _copy_steps(folder: Path, chip: str) -> tuple[tuple[int, int], ...]:
    """Return generation and step of the whole copies of a chip, by their labels."""
    found = list[tuple[int, int]]()
    for label in sorted(folder.glob(f"copy-{chip.replace('/', '-')}-*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError):
            words = json.loads(label.read_text(encoding="utf-8"))
            found.append((int(words["generation"]), int(words["facts"]["progress"]["step"])))
    return tuple(found)


def process_state(pid: int) -> str:
    """Return the kernel's letter for what a process does; empty if there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _alive(pid: int) -> bool:
    return process_state(pid) not in ("", "Z", "X")


def _how(status: int | None) -> str:
    if status is None:
        return "is gone"
    if status >= 0:
        return f"ended with status {status}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-status).name}"
    return f"was killed by signal {-status}"
