"""Ranks of `tutti train` as forks of a process that has imported torch and the engine already.

A rank is started with some words, an environment, descriptors and a log; a rank's imports take two
seconds of a core, a fork some hundredths. `WarmProcess` takes the place of `subprocess.Popen` in
`tutti.ranks.local_processes`: a real process, with the number, session, signals and exit status of
one, which runs the same module as `__main__`. Tests that start `tutti` itself as a process start
ranks as users do.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

ROOT = Path(__file__).parents[2]
MODULES = ("tutti.train.run.rank", "tests.support.faulty_rank")
PRELOADED = (
    "torch", "torch.distributed", "tests.support.faulty_rank", "tutti.train.run.rank",
    "tutti.train.run.worker", "tutti.train.engine.engine", "tutti.train.sync.comm_links",
    "tutti.ranks.rendezvous", "tutti.comm", "tutti.huggingface.tokenizer",
)  # fmt: skip
_MOST_BYTES = 1 << 20
_PATH = os.environ.get("PYTHONPATH")  # of the server, too
_ABOVE = 200  # descriptors of a fork are moved here before they take their numbers


class _Server:
    """The process that forks, started when first asked for; it ends with its owner."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._owner = 0
        self._processes: list[subprocess.Popen[bytes]] = []  # end with this one

    def fork(self, asked: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        with self._lock:
            if self._socket is None or self._owner != os.getpid():
                self._socket, self._owner = self._started(), os.getpid()
            socket.send_fds(self._socket, [json.dumps(asked).encode()], list(descriptors))
            return int(self._socket.recv(64))

    def _started(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno())],
            pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, start_new_session=True, cwd=ROOT,
        )  # fmt: skip
        self._processes.append(process)
        theirs.close()
        return ours


_SERVER = _Server()


class WarmProcess:
    """A process as `subprocess.Popen` gives it, as far as ranks need."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        pass_fds: Sequence[int],
        stdout: IO[bytes],
        **_: Any,
    ) -> None:
        assert command[:2] == [sys.executable, "-m"], command
        self.returncode: int | None = None
        self._status, theirs = os.pipe()
        asked = {"module": command[2], "arguments": list(command[3:]), "environment": dict(env),
                 "folder": os.getcwd(), "numbers": list(pass_fds)}  # fmt: skip
        self.pid = _SERVER.fork(asked, [theirs, stdout.fileno(), *pass_fds])
        os.close(theirs)

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self._end()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            self._end()
        assert self.returncode is not None
        return self.returncode

    def _end(self) -> None:
        told = os.read(self._status, 64)
        os.close(self._status)
        self.returncode = int(told) if told else -signal.SIGKILL  # with its server


def _started(command: Sequence[str], **options: Any) -> Any:
    same = options["env"].get("PYTHONPATH") == _PATH
    warm = list(command[:2]) == [sys.executable, "-m"] and command[2] in MODULES
    return (WarmProcess if same and warm else subprocess.Popen)(command, **options)


class WarmSubprocess:
    """What `tutti.ranks.local_processes` has of the module `subprocess`."""

    DEVNULL = subprocess.DEVNULL
    Popen = staticmethod(_started)


# --- the server's side -----------------------------------------------------------------------


def _serve(descriptor: int) -> None:
    owner = socket.socket(fileno=descriptor)
    for name in PRELOADED:
        importlib.import_module(name)
    ears, bell = os.pipe()
    os.set_blocking(bell, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(bell, warn_on_full_buffer=False)
    waiting: dict[int, int] = {}  # a child's number → where its end is told
    while True:
        ready = select.select([owner.fileno(), ears], [], [])[0]
        if ears in ready:
            os.read(ears, 4096)
            _reap(waiting)
        if owner.fileno() in ready:
            data, descriptors, _, _ = socket.recv_fds(owner, _MOST_BYTES, 16)
            if not data:
                return
            child = os.fork()
            if child == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for own in (ears, bell, owner.detach(), descriptors[0], *waiting.values()):
                    os.close(own)
                _be(json.loads(data), descriptors[1:])
            status, *rest = descriptors
            waiting[child] = status
            for own in rest:
                os.close(own)
            owner.send(str(child).encode())


def _reap(waiting: dict[int, int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            told = waiting.pop(pid)
            with contextlib.suppress(OSError):
                os.write(told, str(os.waitstatus_to_exitcode(status)).encode())
            os.close(told)


def _be(asked: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """Run a module as `__main__` until it ends; never returns."""
    import torch

    from tutti.elastic.fork_server import run_and_exit

    def module() -> int:
        os.setsid()
        high = [os.dup2(own, _ABOVE + i) for i, own in enumerate(descriptors)]
        for own in descriptors:
            os.close(own)
        for own, number in zip(high, [1, *asked["numbers"]], strict=True):
            os.dup2(own, number)
            os.close(own)
        os.dup2(1, 2)
        os.chdir(asked["folder"])
        sys.path[0] = asked["folder"]
        os.environ.clear()
        os.environ.update(asked["environment"])
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        sys.argv = [asked["module"], *asked["arguments"]]
        sys.modules.pop(asked["module"])  # `python -m` runs a module that nobody imported
        runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)
        return 0

    run_and_exit(module)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
