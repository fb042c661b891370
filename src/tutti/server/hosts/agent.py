"""`Agent`: one host of a deployment. It runs what the front wants of it, and says how that is."""

from __future__ import annotations

import os
import socket as sockets
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import zmq

from tutti.elastic.join import zmq_address
from tutti.errors import InputError, TuttiError
from tutti.launch.identity import ATTEMPT
from tutti.launch.secret import SECRET
from tutti.plan.files import save_plan
from tutti.plan.plan import Plan
from tutti.ranks.local_capacity import DEVICE
from tutti.server.engine_group import end_all, start_module
from tutti.server.hosts import messages
from tutti.server.hosts.facts import facts_of
from tutti.server.hosts.messages import (
    BEAT_S,
    CONTROL,
    LOST_S,
    Join,
    RankStatus,
    Refusal,
    Status,
    ToHost,
    Wanted,
    Welcome,
)
from tutti.server.hosts.rank_hosts import Seat, seats_of
from tutti.server.messages import EngineState, HostAddress, ServerConfig, ServerFolder
from tutti.server.sockets import call_by, port_address
from tutti.server.supervisor import PLAN_FILE

LOOK_MS = 100
JOIN_S = 1.0  # between two tries
FIRST_WORD_S = 10.0  # until it is said that nobody answers
Running = tuple[int, int, int]
"""Engine, generation and rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """What an agent is started with."""

    front: tuple[str, int]
    host: str  # as the plan calls it
    folder: Path
    plan: Plan
    ports: int
    device: str | None = None
    wait_s: float = 600.0


def address_towards(front: tuple[str, int]) -> str:
    """Return this host's address on the way to the front: others reach it by the same."""
    try:
        family, kind, _, _, there = sockets.getaddrinfo(*front, type=sockets.SOCK_DGRAM)[0]
        with sockets.socket(family, kind) as probe:
            probe.connect(there)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise InputError(
            f"serve: there is no way to {front[0]} ({error.strerror or error}); is --join right?"
        ) from None


class Agent:
    """The ranks of one host."""

    def __init__(
        self, settings: AgentSettings, secret: bytes, tell: Callable[[str], None], address: str = ""
    ) -> None:
        self._settings, self._secret, self._tell = settings, secret, tell
        seats = seats_of(settings.plan)
        self._seats = {key: seat for key, seat in seats.items() if seat.host == settings.host}
        self._first = {engine: seats[engine, 0] for engine, _ in self._seats}
        self._worlds = {engine: sum(e == engine for e, _ in seats) for engine in self._first}
        self._facts = facts_of(settings.plan, settings.folder)
        self._at = HostAddress(address or address_towards(settings.front), settings.ports)
        self._incarnation = uuid.uuid4().hex
        self._room = tempfile.TemporaryDirectory(prefix="tutti-")
        self.folder = ServerFolder(Path(self._room.name))
        self._running: dict[Running, subprocess.Popen[bytes]] = {}
        self._socket: zmq.Socket[bytes] = self._connected()
        self._heard, self._said_at = time.monotonic(), 0.0
        self._said: Status | None = None
        self.joined = self.stopping = False
        self.looked = time.monotonic()  # by which others see that it does not hang

    # --- with the front --------------------------------------------------------------------

    def run(self) -> None:
        """Take part until the front ends, or this agent is stopped."""
        try:
            while not self.stopping:
                if not self.joined:
                    self._join()
                    continue
                if self._take_part():
                    self._tell("the front has ended")
                    return
        finally:
            self._leave()

    def ready(self) -> bool:
        """Tell whether all ranks that are wanted here run."""
        alive = all(process.poll() is None for process in self._running.values())
        return self.joined and bool(self._running) and alive

    def stop(self, *_args: object) -> None:
        """Leave."""
        self.stopping = True

    def _connected(self) -> zmq.Socket[bytes]:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        made = context.socket(zmq.DEALER)
        made.setsockopt(zmq.LINGER, 500)
        made.setsockopt(zmq.IDENTITY, f"{self._settings.host} {self._incarnation}".encode())
        call_by(made, self._secret, CONTROL)
        made.connect(zmq_address(*self._settings.front))
        return made

    def _join(self) -> None:
        """Ask to take part until the front answers."""
        own, began, said = self._settings, time.monotonic(), ""
        where = f"{own.front[0]}:{own.front[1]}"
        join = Join(host=own.host, incarnation=self._incarnation, facts=self._facts, at=self._at)
        while not self.stopping:
            self._socket.send(messages.encode(join))
            answer = self._answer(JOIN_S)
            self.looked = time.monotonic()
            if isinstance(answer, Welcome):
                self._welcomed(answer)
                return
            waited = time.monotonic() - began
            if isinstance(answer, Refusal):
                if not answer.later:
                    raise InputError(answer.message)
                new = answer.message
            else:
                new = (
                    f"waiting for the front at {where}: nobody answers who has the same secret"
                    if waited > FIRST_WORD_S
                    else ""
                )
            if new and new != said:
                said = new
                self._tell(said)
            if waited > own.wait_s:
                raise TuttiError(
                    f"serve: in {own.wait_s:g} s nobody answered at {where}; is "
                    "`tutti serve --listen` started there, with the same secret?"
                )

    def _answer(self, seconds: float) -> ToHost | None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not self.stopping:
            if self._socket.poll(int(min(left, 0.1) * 1000) + 1):
                said = messages.to_host(self._socket.recv())
                if isinstance(said, Welcome | Refusal):
                    return said
        return None

    def _welcomed(self, said: Welcome) -> None:
        own = self._settings
        engine: dict[str, Any] = {**said.engine}
        for path in self.folder.path.iterdir():
            path.unlink()  # another front counts generations anew: what these said is not so now
        plan = self.folder.path / PLAN_FILE
        save_plan(own.plan, plan)
        config = ServerConfig(
            folder=str(own.folder), name=own.folder.name, engine=engine, plan=str(plan), spread=True
        )
        self.folder.write("config.json", config)
        self.joined, self._heard = True, time.monotonic()
        self._tell(f"{own.host} takes part, at {self._at.address}")

    def _take_part(self) -> bool:
        """Hear and say all of it once; True: the front has ended."""
        if self._socket.poll(LOOK_MS):
            said = messages.to_host(self._socket.recv())
            self._heard = time.monotonic()
            if isinstance(said, Wanted):
                if said.ending:
                    return True
                self._obey(said)
        self.looked = now = time.monotonic()
        if now - self._heard > LOST_S:
            self._tell(f"the front was not heard of for {now - self._heard:.0f} s")
            self._end(self._running)
            self.joined = False
            return False
        self._say(leaving=False)
        return False

    def _say(self, *, leaving: bool) -> None:
        """Say how the ranks are: at once where something changed, else now and then."""
        ranks = [self._status(who, process) for who, process in self._running.items()]
        status = Status(
            host=self._settings.host, incarnation=self._incarnation, ranks=ranks, leaving=leaving
        )
        now = time.monotonic()
        if now - self._said_at > BEAT_S or status != self._said:
            self._said_at, self._said = now, status
            self._socket.send(messages.encode(status))

    def _leave(self) -> None:
        if self.joined:
            self._say(leaving=True)
        self._end(self._running)
        self._socket.close()
        self._room.cleanup()

    # --- processes -------------------------------------------------------------------------

    def _obey(self, wanted: Wanted) -> None:
        """End what is not wanted, start what is."""
        if self.folder.hosts() != wanted.hosts:
            self.folder.write("hosts.json", wanted.hosts)
        new = {
            (engine, generation, rank): self._seats[engine, rank]
            for engine, generation in wanted.engines.items()
            for rank in range(self._worlds.get(engine, 0))
            if (engine, rank) in self._seats
        }
        self._end([who for who in self._running if who not in new])
        for who, seat in new.items():
            if who not in self._running:
                self._running[who] = self._started(who, seat, wanted.hosts)

    def _started(
        self, who: Running, seat: Seat, hosts: Mapping[str, HostAddress]
    ) -> subprocess.Popen[bytes]:
        engine, generation, rank = who
        first = self._first[engine]
        at = hosts[first.host]
        meeting = port_address(at, first.local, "meeting").rpartition(":")[2]
        own = {
            "RANK": str(rank),
            "LOCAL_RANK": str(seat.local),
            "WORLD_SIZE": str(self._worlds[engine]),
            "LOCAL_WORLD_SIZE": str(sum(e == engine for e, _ in self._seats)),
            "MASTER_ADDR": at.address,
            "MASTER_PORT": meeting,
            ATTEMPT: str(generation),
            SECRET: self._secret.decode(),
        }
        if "OMP_NUM_THREADS" not in os.environ:
            own["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // len(self._seats)))
        if self._settings.device:
            own[DEVICE] = self._settings.device
        environment = {**os.environ, **own}
        return start_module("rank_process", self.folder, *map(str, who), environment=environment)

    def _end(self, who: Iterable[Running]) -> None:
        """End ranks at once: their engine starts anew, and the others of it wait for no word."""
        ended = [self._running.pop(one) for one in list(who)]
        for process in ended:
            if process.poll() is None:
                process.kill()
        end_all(ended)

    def _status(self, who: Running, process: subprocess.Popen[bytes]) -> RankStatus:
        engine, generation, rank = who
        path, silent = self.folder.heartbeat(*who), 0.0
        if path.exists():
            silent = time.time() - path.stat().st_mtime
        code, ready, failed = process.poll(), None, ""
        said = self.folder.ready(engine, generation)
        if rank == 0 and said.exists():
            ready = msgspec.json.decode(said.read_bytes(), type=EngineState)
        why = self.folder.failed(engine, generation)
        if code is not None and why.exists():
            failed = msgspec.json.decode(why.read_bytes(), type=str)
        return RankStatus(
            engine=engine, generation=generation, rank=rank, code=code,
            silent_s=float(int(silent)), ready=ready, failed=failed,
        )  # fmt: skip
