"""`EngineGroup`: the processes of one engine, started together and ended together.

One that dies or falls silent takes the others along: they would wait for it. The group is then
started anew, under another generation.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping

import msgspec

from tutti.errors import InputError
from tutti.server.messages import EngineState, ServerFolder

SILENT_S = 6.0  # without a heartbeat: a process that is stopped
COMING_S = 60.0  # the same of one that is not ready: it imports libraries, on a busy host for long
FEWEST_S = 5.0  # an engine that lives no longer does not come up
MOST_STARTS = 3  # of these in a row


class EngineGroup:
    """One engine: a process, or one per rank."""

    def __init__(
        self,
        number: int,
        folder: ServerFolder,
        *,
        ranks: int = 1,
        module: str = "engine_process",
        environment: Callable[[int], Mapping[str, str]] = lambda _rank: {},
        fresh: Callable[[], Mapping[str, str]] = dict,
        name: str = "the engine",
    ) -> None:
        self.number, self.name, self._folder = number, name, folder
        self._ranks, self._module = ranks, module
        self._environment, self._fresh = environment, fresh
        self.state = EngineState(number=number)
        self.processes: list[subprocess.Popen[bytes]] = []
        self._begun, self._short = 0.0, 0
        self.given_up = ""

    def start(self) -> None:
        """Start its processes; what the last ones could take stays known."""
        self.state = msgspec.structs.replace(
            self.state, generation=self.state.generation + 1, address="", ready=False
        )
        self._begun = time.monotonic()
        shared = self._fresh()
        self.processes = [self._started(rank, shared) for rank in range(self._ranks)]

    def _started(self, rank: int, shared: Mapping[str, str]) -> subprocess.Popen[bytes]:
        words = [str(self.state.generation)]
        if self._module == "rank_process":
            words = [str(self.number), *words, str(rank)]
        environment = {**os.environ, **shared, **self._environment(rank)}
        return start_module(self._module, self._folder, *words, environment=environment)

    def look(self) -> str | None:
        """Return what has changed, as a user reads it; None: nothing."""
        if self.given_up:
            return None
        for rank, process in enumerate(self.processes):
            code = process.poll()
            if code is not None:
                who = self.name if self._ranks == 1 else f"rank {rank} of {self.name}"
                return self._again(f"{who} ended ({how(code)})", refused=code == 2)
            path = self._folder.heartbeat(self.number, self.state.generation, rank)
            silent = time.time() - path.stat().st_mtime if path.exists() else 0.0
            if silent > self._patience_s:
                return self._again(f"{self.name} was silent for {silent:.0f} s and was ended")
        if not self.state.ready:
            with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
                path = self._folder.ready(self.number, self.state.generation)
                self.state = msgspec.json.decode(path.read_bytes(), type=EngineState)
                return f"{self.name} is ready after {time.monotonic() - self._begun:.1f} s"
        return None

    @property
    def _patience_s(self) -> float:
        return SILENT_S if self.state.ready else COMING_S

    def _end(self) -> None:
        """End what is left of its processes."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for process in self.processes:
            process.wait()

    def _again(self, why: str, *, refused: bool = False) -> str:
        self._end()
        if refused:
            path = self._folder.failed(self.number, self.state.generation)
            reason = msgspec.json.decode(path.read_bytes(), type=str) if path.exists() else why
            raise InputError(reason)
        self._short = self._short + 1 if time.monotonic() - self._begun < FEWEST_S else 0
        if self._short >= MOST_STARTS:
            self.state = msgspec.structs.replace(self.state, ready=False, address="")
            self.given_up = f"{why}, {self._short} times in a row; see what it wrote above"
            return self.given_up
        self.start()
        return f"{why}; starting another"


def start_module(
    module: str,
    folder: ServerFolder,
    *words: str,
    environment: Mapping[str, str] | None = None,
    passed: Iterable[int] = (),
) -> subprocess.Popen[bytes]:
    """Start one of the server's modules as a process."""
    command = [sys.executable, "-m", f"tutti.server.{module}", str(folder.path), *words]
    # a group of its own: Ctrl-C reaches the supervisor alone, which ends all in order
    return subprocess.Popen(
        command, pass_fds=tuple(passed), process_group=0, env=dict(environment or os.environ)
    )


def end_all(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """End processes: asked first, then made to."""
    alive = [process for process in processes if process.poll() is None]
    for process in alive:
        process.terminate()
    until = time.monotonic() + 5.0
    for process in alive:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def how(code: int) -> str:
    """Return how a process ended."""
    return f"signal {-code}" if code < 0 else f"code {code}"
