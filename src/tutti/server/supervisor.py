"""Starts a server's processes, restarts what dies or hangs, and ends them in order.

The port is bound here and handed to every API process: if one dies, the port stays. On SIGTERM
nothing new is taken, what runs goes to its end, then all leave.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import zmq

from tutti.errors import InputError, TuttiError
from tutti.server.messages import Gone, ServerConfig, ServerFolder, State, encode

log = logging.getLogger(__name__)
SILENT_S = 6.0  # without a heartbeat: an engine that is stopped
DRAIN_S = 30.0
LOOK_S = 0.1
FEWEST_S = 5.0  # an engine that lives no longer does not come up
MOST_STARTS = 3  # of these in a row


def bound(host: str, port: int) -> socket.socket:
    """Return a listening socket, or say who cannot have it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
    except (OSError, OverflowError) as error:
        found.close()
        raise InputError(
            f"serve: {host}:{port} cannot be taken ({error}); choose another with --port"
        ) from None
    found.listen(2048)
    return found


class Supervisor:
    """The processes of one server."""

    def __init__(self, config: ServerConfig, tell: Callable[[str], None] = lambda _: None) -> None:
        self.config, self._tell = config, tell
        self._socket = bound(config.host, config.port)
        self._room = tempfile.TemporaryDirectory(prefix="tutti-")
        self.folder = ServerFolder(Path(self._room.name))
        self.port = int(self._socket.getsockname()[1])
        self._engine: subprocess.Popen[bytes] | None = None
        self._apis: dict[int, subprocess.Popen[bytes]] = {}
        self._state = State()
        self._begun, self._short = 0.0, 0
        self._stopping = False

    def __enter__(self) -> Self:
        self.folder.write("config.json", self.config)
        self._start_engine()
        for number in range(self.config.apis):
            self._start_api(number)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end(self._apis.values())
        if self._engine is not None:
            self._end([self._engine])
        self._socket.close()
        self._room.cleanup()

    @property
    def pids(self) -> dict[str, int]:
        """The processes, by what they are."""
        found = {f"api{number}": api.pid for number, api in self._apis.items()}
        if self._engine is not None:
            found["engine"] = self._engine.pid
        return found

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
        self._look_at_engine()
        for number, api in list(self._apis.items()):
            code = api.poll()
            if code is not None:
                self._tell(f"API process {number} ended ({_how(code)}); starting another")
                self._say_gone(_api_name(number))
                self._start_api(number)

    # --- the engine ------------------------------------------------------------------------

    def _look_at_engine(self) -> None:
        assert self._engine is not None
        code, generation = self._engine.poll(), self._state.generation
        if code is not None:
            self._restart(f"the engine ended ({_how(code)})", refused=code == 2)
            return
        if not self._state.ready:
            with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
                data = self.folder.ready(generation).read_bytes()
                said = msgspec.json.decode(data, type=State)
                self._say(msgspec.structs.replace(said, draining=self._state.draining))
                took = time.monotonic() - self._begun
                self._tell(f"the engine is ready after {took:.1f} s")
        path = self.folder.heartbeat(generation)
        silent = time.time() - path.stat().st_mtime if path.exists() else 0.0
        if silent > SILENT_S:
            self._engine.kill()
            self._engine.wait()
            self._restart(f"the engine was silent for {silent:.0f} s and was ended", refused=False)

    def _restart(self, why: str, *, refused: bool) -> None:
        generation = self._state.generation
        if refused:
            path = self.folder.path / f"failed{generation}.json"
            reason = msgspec.json.decode(path.read_bytes(), type=str) if path.exists() else why
            raise InputError(reason)
        self._short = self._short + 1 if time.monotonic() - self._begun < FEWEST_S else 0
        if self._short >= MOST_STARTS:
            raise TuttiError(f"{why}, {self._short} times in a row; see what it wrote above")
        self._tell(f"{why}; starting another")
        self._start_engine()

    def _start_engine(self) -> None:
        generation = self._state.generation + 1
        # what the last one could take stays known: requests are queued until the next is ready
        self._say(
            msgspec.structs.replace(self._state, generation=generation, address="", ready=False)
        )
        self._begun = time.monotonic()
        self._engine = self._start("engine_process", str(generation))

    # --- API processes ---------------------------------------------------------------------

    def _start_api(self, number: int) -> None:
        descriptor = self._socket.fileno()
        self._apis[number] = self._start(
            "api_process", str(descriptor), _api_name(number).decode(), descriptor=descriptor
        )

    def _say_gone(self, client: bytes) -> None:
        """Let the engine drop what a dead API process asked for."""
        if not self._state.ready:
            return
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        with context.socket(zmq.DEALER) as own:
            own.setsockopt(zmq.LINGER, 1000)
            own.connect(self._state.address)
            own.send(encode(Gone(client)))
        context.term()

    # --- all -------------------------------------------------------------------------------

    def _start(
        self, module: str, *words: str, descriptor: int | None = None
    ) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", f"tutti.server.{module}", str(self.folder.path), *words]
        passed = () if descriptor is None else (descriptor,)
        # a group of its own: Ctrl-C reaches the supervisor alone, which ends all in order
        return subprocess.Popen(command, pass_fds=passed, process_group=0, env=dict(os.environ))

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
            self._look_at_engine()
            time.sleep(LOOK_S)

    @staticmethod
    def _end(processes: object) -> None:
        """End processes: asked first, then made to."""
        alive = [p for p in processes if p.poll() is None]  # type: ignore[attr-defined]
        for process in alive:
            process.terminate()
        until = time.monotonic() + 5.0
        for process in alive:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _api_name(number: int) -> bytes:
    return f"api{number}-{os.getpid()}".encode()


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"code {code}"
