"""The ranks of a job as processes of this machine: started, listened to, ended.

Each rank has a log file and a pipe for its events. The first one that fails ends the job, and its
own words are what the user reads; ranks that only lost a peer are not believed to be the cause.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tutti.errors import InputError, StoppedError, error_with
from tutti.launch.secret import SECRET, new_secret
from tutti.ranks.events import PIPE

LAST_WORDS_S = 5.0  # for other ranks to say more about a failure


@dataclass(frozen=True, slots=True)
class RankEvent:
    """What a rank said."""

    rank: int
    kind: str
    values: Mapping[str, Any]


@dataclass(slots=True)
class _Rank:
    process: subprocess.Popen[bytes]
    pipe: IO[bytes]
    log: Path
    unread: bytes = b""
    ended: bool = False


def free_port(address: str = "127.0.0.1") -> int:
    """Return a port that nobody listens on now."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def require_free(port: int, address: str = "127.0.0.1") -> None:
    """Raise unless a port can be listened on."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except (OSError, OverflowError) as error:
            reason = (getattr(error, "strerror", None) or str(error)).lower()
            raise InputError(
                f"--port {port}: {reason}; leave it out and a free one is taken"
            ) from None


@dataclass(slots=True)
class LocalRanks:
    """The rank processes of one job."""

    run_file: Path
    num_ranks: int
    port: int | None = None
    environment: Mapping[int, Mapping[str, str]] = field(default_factory=dict)  # per rank, besides
    resume: bool | int = False  # True: from the newest checkpoint; else from that of a step
    claim: int | None = None  # a file descriptor by which the first rank holds the folder, too
    _ranks: list[_Rank] = field(default_factory=list)
    _asked: int = 0
    asked_by: int = 0  # the signal that came first

    def start(self) -> None:
        """Start them all."""
        if self.port is not None:
            require_free(self.port)
        port = self.port or free_port()
        logs = self.run_file.parent / "logs"
        logs.mkdir(exist_ok=True)
        secret = new_secret()
        threads = str(max(1, (os.cpu_count() or 1) // self.num_ranks))
        for rank in range(self.num_ranks):
            ours, theirs = os.pipe()
            environment = {
                "OMP_NUM_THREADS": threads,
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(self.num_ranks),
                "WORLD_SIZE": str(self.num_ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                SECRET: secret,
                PIPE: str(theirs),
                **self.environment.get(rank, {}),
            }
            log = logs / f"rank-{rank}.log"
            command = [sys.executable, "-m", "tutti.train.run.rank", str(self.run_file)]
            held = (self.claim,) if self.claim is not None and rank == 0 else ()
            with log.open("wb") as file:
                process = subprocess.Popen(
                    [*command, *self._resumed()],
                    env=environment, pass_fds=(theirs, *held), stdin=subprocess.DEVNULL,
                    stdout=file, stderr=file, start_new_session=True,
                )  # fmt: skip
            os.close(theirs)
            os.set_blocking(ours, False)
            self._ranks.append(_Rank(process, os.fdopen(ours, "rb", buffering=0), log))

    def _resumed(self) -> list[str]:
        if self.resume is False:
            return []
        return ["--resume" if self.resume is True else f"--resume={self.resume}"]

    def events(self) -> Iterator[RankEvent]:
        """Yield what the ranks say until all have ended; raise when one failed."""
        with selectors.DefaultSelector() as selector:
            for number, rank in enumerate(self._ranks):
                selector.register(rank.pipe, selectors.EVENT_READ, number)
            failures: list[RankEvent] = []
            deadline = float("inf")
            while selector.get_map() and time.monotonic() < deadline:
                for key, _ in selector.select(timeout=0.5):
                    rank = self._ranks[key.data]
                    for event in _read(rank, key.data):
                        if event.kind == "error":
                            failures.append(event)
                        else:
                            yield event
                    if rank.ended:
                        selector.unregister(rank.pipe)
                        failures += self._silent_failure(key.data, failures)
                if failures and deadline == float("inf"):
                    deadline = time.monotonic() + LAST_WORDS_S
        if self._asked > 1:
            self.end()
            raise StoppedError(
                "ended at once, as asked; what was not saved is lost", by=self.asked_by
            )
        if failures:
            self.end()
            cause = next((f for f in failures if f.values.get("cause")), failures[0])
            raise error_with(int(cause.values.get("code", 1)), self._blame(cause))
        for rank in self._ranks:
            rank.process.wait()

    def _silent_failure(self, number: int, failures: list[RankEvent]) -> list[RankEvent]:
        """Return the failure of a rank that ended without a word."""
        rank = self._ranks[number]
        code = rank.process.wait()
        if code == 0 or any(f.rank == number for f in failures):
            return []
        if self._asked == 1 and code == -signal.SIGTERM:  # not yet ready to listen
            said = {"text": "was stopped before it began", "code": 128 + self.asked_by}
            return [RankEvent(number, "error", {"cause": True, **said})]
        how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with status {code}"
        return [RankEvent(number, "error", {"text": how, "cause": True})]

    def _blame(self, cause: RankEvent) -> str:
        where = cause.values.get("where", "")
        of = f"rank {cause.rank}" + (f" ({where})" if where else "")
        return f"{of}: {cause.values['text']}; its log: {self._ranks[cause.rank].log}"

    def ask_to_stop(self, by: int = signal.SIGTERM) -> None:
        """Let the ranks finish their step, save and end; asked twice, end them now."""
        self._asked += 1
        self.asked_by = self.asked_by or by
        self._signal(signal.SIGTERM if self._asked == 1 else signal.SIGKILL)

    def _signal(self, number: int) -> None:
        for rank in self._ranks:
            if rank.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(rank.process.pid, number)

    def end(self, grace_s: float = 2.0) -> None:
        """End every process that is left."""
        self._signal(signal.SIGTERM)
        limit = time.monotonic() + grace_s
        while time.monotonic() < limit and any(r.process.poll() is None for r in self._ranks):
            time.sleep(0.05)
        self._signal(signal.SIGKILL)
        for rank in self._ranks:
            rank.process.wait()
            rank.pipe.close()


def _read(rank: _Rank, number: int) -> Iterator[RankEvent]:
    try:
        data = rank.pipe.read()
    except BlockingIOError:
        return
    if data is None:
        return
    rank.ended = not data
    *lines, rank.unread = (rank.unread + data).split(b"\n")
    for line in lines:
        values = json.loads(line)
        yield RankEvent(number, values.pop("kind"), values)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
