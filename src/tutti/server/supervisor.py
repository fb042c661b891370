"""Starts a server's processes, restarts what dies or hangs, and ends them in order.

The port is bound here and handed to every API process: if one dies, the port stays. On SIGTERM
nothing new is taken, what runs goes to its end, then all leave.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import msgspec
import zmq

from tutti.errors import InputError, TuttiError
from tutti.plan.files import save_plan
from tutti.plan.plan import Plan
from tutti.server.engine_group import EngineGroup, end_all, how, start_module
from tutti.server.messages import Gone, ServerConfig, ServerFolder, State, encode
from tutti.server.sockets import ServerSockets, SocketName

if TYPE_CHECKING:
    from tutti.server.hosts.front import Hosts

log = logging.getLogger(__name__)
DRAIN_S = 30.0
LOOK_S = 0.1
PLAN_FILE = "plan.json"


def bound(host: str, port: int) -> socket.socket:
    """Return a listening socket, or say who cannot have it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise InputError(
            f"serve: {host}:{port} cannot be taken ({error}); choose another with --port"
        ) from None
    listener.listen(2048)
    return listener


class Supervisor:
    """The processes of one server."""

    def __init__(
        self,
        config: ServerConfig,
        tell: Callable[[str], None] = lambda _: None,
        plan: Plan | None = None,
        hosts: Hosts | None = None,
    ) -> None:
        """Take the port; `plan`: the engines that are started, else one; `hosts`: on these."""
        self.config, self._tell, self._hosts = config, tell, hosts
        self._socket = bound(config.host, config.port)
        self._room = tempfile.TemporaryDirectory(prefix="tutti-")
        self.folder = ServerFolder(Path(self._room.name))
        self.port = int(self._socket.getsockname()[1])
        self._apis: dict[int, subprocess.Popen[bytes]] = {}
        self._state = State()
        self._engines = [EngineGroup(0, self.folder)]
        if plan is not None:
            from tutti.server.planned_engines import engine_groups, hosted_groups

            self.config = msgspec.structs.replace(config, plan=str(self.folder.path / PLAN_FILE))
            save_plan(plan, Path(self.config.plan))
            if hosts is None:
                self._engines = engine_groups(plan, self.folder, config)
            else:
                self._engines = hosted_groups(plan, self.folder, hosts)
        self._sockets = ServerSockets.of(self.folder, self.config)
        self._stopping = False

    def __enter__(self) -> Self:
        self.folder.write("config.json", self.config)
        for engine in self._engines:
            engine.start()
            self._say(self._state.with_engine(engine.state))
        for number in range(self.config.apis):
            self._start_api(number)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        end_all(self._apis.values())
        end_all(process for engine in self._engines for process in engine.processes)
        if self._hosts is not None:
            self._hosts.close()
        self._socket.close()
        self._room.cleanup()

    @property
    def pids(self) -> dict[str, int]:
        """The processes, by what they are."""
        pids = {f"api{number}": api.pid for number, api in self._apis.items()}
        for engine in self._engines:
            for rank, process in enumerate(engine.processes):
                pids[f"engine{engine.number}" + (f".{rank}" if rank else "")] = process.pid
        return pids

    @property
    def state(self) -> State:
        """How the engines are."""
        return self._state

    def stop(self, *_args: object) -> None:
        """Take nothing new; end when all that runs has ended."""
        self._stopping = True

    def run(self) -> None:
        """Watch the processes until `stop`."""
        while not self._stopping:
            self.look()
            time.sleep(LOOK_S)
        self._drain()

    def look(self) -> None:
        """Take note of who is ready; start again who is not there any more."""
        self._look_at_engines()
        for number, api in list(self._apis.items()):
            code = api.poll()
            if code is not None:
                self._tell(f"API process {number} ended ({how(code)}); starting another")
                self._say_gone(_api_name(number))
                self._start_api(number)

    def _look_at_engines(self) -> None:
        for line in () if self._hosts is None else self._hosts.look():
            self._tell(line)
        for engine in self._engines:
            said = engine.look()
            if said is not None:
                self._say(self._state.with_engine(engine.state))
                self._tell(said)
        if all(engine.given_up for engine in self._engines):
            raise TuttiError(self._engines[0].given_up)

    # --- API processes ---------------------------------------------------------------------

    def _start_api(self, number: int) -> None:
        descriptor = self._socket.fileno()
        name = _api_name(number).decode()
        self._apis[number] = start_module(
            "api_process", self.folder, str(descriptor), name, passed=(descriptor,)
        )

    def _say_gone(self, client: bytes) -> None:
        """Let engines drop what a dead API process asked for."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        for engine in self._state.engines:
            if engine.ready:
                with context.socket(zmq.DEALER) as own:
                    own.setsockopt(zmq.LINGER, 1000)
                    name = SocketName("engine", engine.number, engine.generation)
                    self._sockets.connect(own, name, engine.address)
                    own.send(encode(Gone(client)))
        context.term()

    # --- all -------------------------------------------------------------------------------

    def _say(self, state: State) -> None:
        self._state = state
        self.folder.write("state.json", state)

    def _drain(self) -> None:
        """Let API processes answer what they have taken, and no more."""
        self._say(msgspec.structs.replace(self._state, draining=True))
        for api in self._apis.values():
            if api.poll() is None:
                api.send_signal(signal.SIGTERM)
        until = time.monotonic() + DRAIN_S
        while time.monotonic() < until and any(api.poll() is None for api in self._apis.values()):
            self._look_at_engines()
            time.sleep(LOOK_S)


def _api_name(number: int) -> bytes:
    return f"api{number}-{os.getpid()}".encode()
